"""From a step's scored rollouts to optimizer steps: what each part of `algo` is given, and in which order.

every model's log-probabilities → advantages → corrections → epochs × minibatches of selections, loss, aggregation,
gradient, AdamW
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from hybrid_rl.algo import kl
from hybrid_rl.algo.batch import Given, Scored
from hybrid_rl.algo.contract import look_of
from hybrid_rl.algo.declared import needs
from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.algo.ratio import quantiles
from hybrid_rl.config import AlgoConfig, KlPlace, OldLogprobs, unbiased_kl
from hybrid_rl.policy.layout import choose_layout, sampled_tokens
from hybrid_rl.policy.numbers import Fault, alone, broken_weight, find, finite
from hybrid_rl.policy.optimizer import TrainingDiverged, make_optimizer
from hybrid_rl.policy.roles import Frozen, make_critic, make_reference, make_teacher
from hybrid_rl.policy.update import Objective, observe, score, update
from hybrid_rl.rollout.collector import Batch
from hybrid_rl.run_folder.bad_batch import BadBatch, BadBatches
from hybrid_rl.session import Session
from hybrid_rl.types import Rollout

MEASURED = ("loss", "entropy", "mismatch_kl", "clip_fraction", "grad_norm")  # by an update: None in a step without one
ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
RECOMPUTED, REFERENCE, TEACHER, VALUE = (
    "recomputed log-probability",
    "reference's log-probability",
    "teacher's log-probability",
    "value",
)
Numbers = dict[str, Any]  # an RL step's metrics: a float, or None if it was not measured; and why nothing was trained
Advantages = dict[tuple[int, int], float]  # of (group id, index): the mean over the rollout's tokens


@dataclass(slots=True)
class Minibatch:
    """Whole groups, and where their tokens lie among the batch's."""

    rollouts: list[Rollout]
    first: int  # number of its first rollout in the batch


class Learner:
    """The parts and models that algo names, and the optimizer. All of it is collective: every rank is given the whole
    batch."""

    def __init__(self, s: Session, start: int):
        algo, self.s = s.config.algo, s
        self.advantages = instantiate(algo.advantage, _partial_=True)
        self.aggregate = instantiate(algo.aggregation, _partial_=True)
        self.corrections = {name: instantiate(part, _partial_=True) for name, part in algo.correction.items()}
        self.selections = {name: instantiate(part, _partial_=True) for name, part in algo.selection.items()}
        self.look = look_of(algo.loss)
        self.kl, self.kl_coef = ESTIMATORS[algo.kl.estimator.value], algo.kl.coef
        wanted = needs(algo.advantage)
        self.greedy = "greedy" in wanted
        a_step, self.warmup = algo.epochs * algo.minibatches, algo.critic.warmup_steps if "values" in wanted else 0
        self.optimizer = make_optimizer(
            s.policy, s.config.rl.optimizer, max(0, s.config.rl.steps - self.warmup) * a_step
        )
        self.reference = make_reference(s, start)
        self.teacher = make_teacher(s) if "teacher_logprobs" in wanted else None
        self.critic = make_critic(s, s.config.rl.steps * a_step) if "values" in wanted else None

    def park(self) -> None:
        """What only the updates need makes room for the engine; the policy's own optimizer is the handover's to park.
        All comes back by itself."""
        if self.critic:
            self.critic.park()

    def state(self) -> dict[str, float]:
        """What a resumed run needs besides weights and moments."""
        return {"kl_coef": self.kl_coef}

    def restore(self, state: dict[str, float]) -> None:
        self.kl_coef = state["kl_coef"]

    def learn(self, batch: Batch, step: int) -> tuple[Numbers, Advantages]:
        """Take all updates of RL step number `step`, and note in `batch.trained` which rollouts they used.

        Statistics are means over the updates, None if there was none; "nothing_trained" says then why, by the names of
        console.NOTHING. Only the mismatch is from before the first update: after it the difference is learning.
        """
        algo = self.s.config.algo
        numbers: Numbers = dict.fromkeys((*MEASURED, *(["reference_kl"] if self.reference else [])))
        self._go_to(step)
        numbers |= {
            "lr": self.optimizer.learning_rate() if step > self.warmup else None,
            "skipped": 0.0,
            "trained": 0,
            "nothing_trained": None,
        }
        if not batch.groups:
            return numbers | {"nothing_trained": "silent"}, {}
        minibatches = _split(batch, algo.minibatches)
        scored, reference = self._score(batch, minibatches)
        columns = _recorded(scored, reference)
        advantages, targets = _pair(self.advantages(scored))
        if advantages.shape == scored.outcomes.shape and advantages.shape != scored.rollout.shape:
            advantages = scored.to_tokens(advantages)
        corrections, kept, dropped = self._correct(scored)
        advantages, targets, corrections, kept = self._as_on_main(advantages, targets, corrections, kept)
        columns |= {"advantage": advantages, "correction": corrections} | (
            {} if targets is None else {"target": targets}
        )
        if not finite(columns.values()):
            self.optimizer.skip(self._locate(columns, batch.rollouts))
            self._keep(BadBatch("scored", step, batch.groups, range(len(batch.rollouts)), columns))
            return numbers | {"skipped": 1.0, "nothing_trained": "not_finite"}, {}
        numbers |= dropped | {"advantage_std": float(advantages[kept].std()) if kept.sum() > 1 else None}
        if scored.values is not None and targets is not None:
            numbers["explained_variance"] = _explained(scored.values[kept], targets[kept])
        objective = objective_of(algo, self.kl_coef)
        given = Given(
            advantages,
            scored.old_logprobs,
            scored.behaviour_logprobs,
            scored.rollout,
            corrections,
            kept.float(),
            1.0,
            reference,
        )
        results, log_ratios = [], []
        other_terms = objective.entropy_coef or (objective.kl_coef and reference is not None)
        seen = set(
            given.rollout[kept if other_terms else kept & (corrections != 0)].tolist()
        )  # the loss of at least one token is not 0
        for epoch in range(algo.epochs):
            for position, minibatch in enumerate(minibatches):
                members, own, chosen = self._select(minibatch, given, kept)
                if not members:
                    continue
                self._go_to(step, epoch * algo.minibatches + position)
                rollouts = [batch.rollouts[i] for i in members]
                result: dict[str, float] = {}
                bad = BadBatch(
                    "policy",
                    step,
                    batch.groups,
                    members,
                    dict(_columns(own)),
                    {"divisor": own.divisor, "kl_coef": self.kl_coef},
                )
                if self.critic:
                    assert scored.values is not None
                    assert targets is not None
                    values, goals = scored.values[chosen], targets[chosen]
                    result |= self.critic.update(rollouts, values, goals, own, *self._rows)
                    if self.critic.optimizer.fault:
                        self._keep(
                            replace(bad, kind="critic", columns={**bad.columns, "values": values, "targets": goals})
                        )
                if step > self.warmup:
                    own, selected = self._observe(rollouts, own, kept[chosen])
                    updated, ratios = update(
                        self.s.policy, self.optimizer, rollouts, own, objective, self._temperature, *self._rows
                    )
                    if self.optimizer.fault:
                        self._keep(replace(bad, columns=dict(_columns(own))))
                    result |= selected | updated | {"skipped": updated["skipped"] + result.get("skipped", 0.0)}
                    log_ratios.append(ratios)
                results.append(result)
                if not result["skipped"] and (self.critic or result["grad_norm"]):
                    batch.trained |= {
                        (batch.rollouts[i].group_id, batch.rollouts[i].index) for i in members if i in seen
                    }
        self._check_weights(step)
        numbers |= _means(results) | {"trained": len(batch.trained)}
        if not batch.trained:
            numbers["nothing_trained"] = _why_nothing(numbers, scored, seen)
        numbers |= (
            {f"ratio_{name}": value for name, value in quantiles(torch.cat(log_ratios)).items()} if log_ratios else {}
        )
        if algo.old_logprobs == OldLogprobs.recomputed:
            numbers["mismatch_kl"] = float(mismatch_kl(scored.old_logprobs, scored.behaviour_logprobs).mean())
        if algo.kl.target:
            numbers["kl_coef"] = self.kl_coef
        if algo.kl.target and log_ratios:
            self.kl_coef = kl.adapted(self.kl_coef, numbers["reference_kl"], algo.kl.target, algo.kl.horizon)
        means = scored.mean_of_rollout(advantages).tolist()
        return numbers, {(r.group_id, r.index): a for r, a in zip(batch.rollouts, means, strict=True)}

    def _go_to(self, step: int, update: int = 0) -> None:
        """Set both schedules to an update of a step. The learning rate follows the steps of the run, those without an
        update included."""
        a_step = self.s.config.algo.epochs * self.s.config.algo.minibatches
        self.optimizer.steps = max(0, (step - 1 - self.warmup) * a_step + update)
        if self.critic:
            self.critic.optimizer.steps = (step - 1) * a_step + update

    @property
    def _rows(self) -> tuple[Any, int]:
        return choose_layout(self.s.config.policy.layout, self.s.policy.device), self.s.config.policy.row_tokens

    @property
    def _temperature(self) -> float:
        return self.s.config.rollout.temperature

    def _score(self, batch: Batch, minibatches: Sequence[Minibatch]) -> tuple[Scored, Tensor | None]:
        """The batch's numbers from every model that has a say, before any of them moves; and the reference's
        log-probabilities."""
        algo, rollouts, device = self.s.config.algo, batch.rollouts, self.s.policy.device

        def of(role: Frozen | None) -> Tensor:
            """By minibatch, in the very rows of the update: equal weights then give equal numbers, to the bit."""
            return torch.cat([self._of(role, part.rollouts) for part in minibatches])

        behaviour = sampled_tokens(rollouts, device).behaviour_logprobs
        cut = [algo.mask_truncated and r.finish_reason == "length" for r in rollouts]
        scored = Scored(
            outcomes=torch.tensor([r.reward for r in rollouts], dtype=torch.float32, device=device),
            group_sizes=[len(group.rollouts) for group in batch.groups],
            lengths=torch.tensor([r.sampled for r in rollouts], device=device),
            kept=~torch.tensor(cut, device=device),
            parts={
                name: torch.tensor(column, dtype=torch.float32, device=device)
                for name, column in _parts(rollouts).items()
            },
            behaviour_logprobs=behaviour,
            old_logprobs=of(None) if algo.old_logprobs == OldLogprobs.recomputed else behaviour,
        )
        reference = of(self.reference) if self.reference else None
        if self.teacher:
            scored.teacher_logprobs = of(self.teacher)
        if self.greedy:
            scored.greedy = torch.tensor([batch.greedy[r.group_id] for r in rollouts], device=device)
        if self.critic:
            scored.values = torch.cat([self.critic.values(part.rollouts, *self._rows) for part in minibatches])
        if reference is not None and algo.kl.place == KlPlace.reward:
            scored.penalties = -self.kl_coef * self.kl(scored.old_logprobs, reference)
        return scored, reference

    def _of(self, role: Frozen | None, rollouts: Sequence[Rollout]) -> Tensor:
        with role.awake() if role else nullcontext(self.s.policy) as model:
            return score(model, rollouts, self._temperature, *self._rows)

    def _locate(self, columns: dict[str, Tensor], rollouts: Sequence[Rollout]) -> Fault:
        """The first number that is not finite, of the sample that brought it."""
        models: dict[str, Callable[[list[Rollout]], Tensor]] = {
            RECOMPUTED: lambda r: self._of(None, r), REFERENCE: lambda r: self._of(self.reference, r),
            TEACHER: lambda r: self._of(self.teacher, r), VALUE: lambda r: self.critic.values(r, *self._rows) if self.critic else torch.zeros(0),
        }  # fmt: skip
        fault = find(columns, rollouts)
        assert fault is not None
        return alone(fault, models[fault.what], rollouts) if fault.what in models else fault

    def _correct(self, scored: Scored) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Every correction together: weights multiply [N], and a token is kept [N] where all keep it; with what was
        dropped."""
        weights, kept = torch.ones_like(scored.old_logprobs), scored.to_tokens(scored.kept)
        numbers: dict[str, float] = {}
        for correct in self.corrections.values():
            own, keeps = correct(scored)
            weights, kept = weights * own, kept & keeps
        if self.corrections:
            dropped = (~kept | (weights == 0)) & scored.to_tokens(scored.kept)
            numbers = {
                f"correction_{name}": value
                for name, value in quantiles(scored.old_logprobs - scored.behaviour_logprobs).items()
            }
            numbers["dropped"] = float(dropped.float().mean())
        return weights, kept, numbers

    def _as_on_main(self, *columns: Any) -> Sequence[Any]:
        """Rank 0's columns on every rank: a GPU's sums have no fixed order, and ranks that keep different rollouts
        would wait for ever."""
        ranks, device = self.s.policy.ranks, self.s.policy.device
        if ranks.world == 1:
            return columns
        same = ranks.from_main(lambda: [None if c is None else c.cpu() for c in columns])
        return [None if c is None else c.to(device) for c in same]

    def _keep(self, bad: BadBatch) -> None:
        """Name the fault of the step that was just skipped and keep its batch. Raises TrainingDiverged where there were
        too many in a row."""
        optimizer, model, folder = self.optimizer, self.s.policy, self.s.model_folder
        if bad.kind == "critic":
            assert self.critic is not None
            optimizer, model, folder = (
                self.critic.optimizer,
                self.critic.model,
                Path(self.s.config.algo.critic.path or folder),
            )
        assert optimizer.fault is not None
        bad = replace(bad, facts={**bad.facts, "scale": optimizer.scale})
        bad_batches = BadBatches(self.s.folder, self.s.config, self.s.progress, self.s.console.say)
        bad_batches.keep(bad, optimizer.fault, model, folder)
        optimizer.check()

    def _check_weights(self, step: int) -> None:
        """Raises TrainingDiverged where a weight is not finite, which no skipped step could mend: before it reaches
        engine or checkpoint."""
        for what, model in (("policy", self.s.policy), *([("critic", self.critic.model)] if self.critic else [])):
            if name := broken_weight(model):
                raise TrainingDiverged(
                    f"after the update of step {step} the {what}'s {name} is infinite or NaN; lower the learning rate. "
                    "The same command with resume=auto goes on from the last checkpoint"
                )

    def _select(self, minibatch: Minibatch, given: Given, kept: Tensor) -> tuple[list[int], Given, Tensor]:
        """The minibatch's rollouts of which the loss sees something, what is given of their tokens, and which those are
        [N] bool."""
        last = minibatch.first + len(minibatch.rollouts)
        alive = set(given.rollout[kept].tolist())
        numbers = [i for i in range(minibatch.first, last) if i in alive]
        inside = (given.rollout >= minibatch.first) & (
            given.rollout < last
        )  # dropped rollouts too: a divisor may count them
        weights = torch.zeros_like(given.weights)
        weights[inside], divisor = self.aggregate(kept[inside], given.rollout[inside], self.s.config.rollout.max_tokens)
        chosen = torch.isin(given.rollout, torch.tensor(numbers, dtype=torch.int64, device=kept.device))
        columns = {name: column[chosen] for name, column in _columns(replace(given, weights=weights))}
        return numbers, replace(given, **columns, divisor=divisor), chosen

    def _observe(self, rollouts: Sequence[Rollout], given: Given, kept: Tensor) -> tuple[Given, dict[str, float]]:
        """What selections and the loss's look find in the minibatch as the policy is now, before its rows; and the
        share that is selected."""
        if not self.selections and not self.look:
            return given, {}
        logprobs, entropy = observe(self.s.policy, rollouts, self._temperature, *self._rows)
        minibatch = given.at(kept, logprobs[kept], entropy[kept])
        weights = torch.ones_like(minibatch.logprobs)
        for select in self.selections.values():
            weights = weights * select(minibatch)
        look = self.look(minibatch) if self.look else None
        weights, look = self._as_on_main(weights, look)
        corrections, looked = given.corrections.clone(), None
        corrections[kept] *= weights
        if look is not None:
            looked = look.new_zeros(len(kept))
            looked[kept] = look
        selected = {"selected": float((weights != 0).float().mean())} if self.selections else {}
        return replace(given, corrections=corrections, look=looked), selected


def objective_of(algo: AlgoConfig, kl_coef: float) -> Objective:
    coef = kl_coef if algo.kl.place == KlPlace.loss else 0.0
    estimator = ESTIMATORS[algo.kl.estimator.value]
    return Objective(instantiate(algo.loss, _partial_=True), estimator, unbiased_kl(algo), coef, algo.entropy_coef)


def _recorded(scored: Scored, reference: Tensor | None) -> dict[str, Tensor]:
    """Every number that the batch was scored with, by the name that a person knows it by."""
    names = {
        "reward": scored.outcomes, "engine's log-probability": scored.behaviour_logprobs, RECOMPUTED: scored.old_logprobs,
        REFERENCE: reference, TEACHER: scored.teacher_logprobs, VALUE: scored.values,
        "greedy reward": scored.greedy, "penalty": scored.penalties,
    }  # fmt: skip
    return {name: column for name, column in names.items() if column is not None}


def _parts(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Each part of the rewards by name, one number a rollout: 0 in those whose reward lacks it."""
    names = dict.fromkeys(name for r in rollouts for name in r.reward_parts)
    return {name: [r.reward_parts.get(name, 0.0) for r in rollouts] for name in names}


def _why_nothing(numbers: Numbers, scored: Scored, seen: set[int]) -> str:
    """The name in console.NOTHING of what left a batch with groups untrained."""
    if numbers["skipped"]:
        return "not_finite"
    if not scored.kept.any():
        return "truncated"
    return "zero_gradient" if seen else "corrected"


def _split(batch: Batch, minibatches: int) -> list[Minibatch]:
    """Whole groups, in order, into parts of one size; the last may be smaller where groups are missing."""
    size, parts, first = max(1, -(-len(batch.groups) // minibatches)), [], 0
    for i in range(0, len(batch.groups), size):
        rollouts = [r for group in batch.groups[i : i + size] for r in group.rollouts]
        parts.append(Minibatch(rollouts, first))
        first += len(rollouts)
    return parts


def _pair(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    return result if isinstance(result, tuple) else (result, None)


def _columns(given: Given) -> Iterator[tuple[str, Tensor]]:
    names = (
        "advantages",
        "old_logprobs",
        "behaviour_logprobs",
        "rollout",
        "corrections",
        "weights",
        "reference_logprobs",
        "look",
    )
    return ((name, column) for name in names if (column := getattr(given, name)) is not None)


def _means(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over the updates that have the number; the mismatch of the first, skipped steps counted."""
    names = dict.fromkeys(name for result in results for name in result)
    means = {name: statistics.fmean(r[name] for r in results if name in r) for name in names}
    if "mismatch_kl" in means:
        means["mismatch_kl"] = next(r["mismatch_kl"] for r in results if "mismatch_kl" in r)
        means["clip_fraction"] = sum(means.get(name, 0.0) for name in ("clip_low", "clip_high"))
    if "skipped" in means:
        means["skipped"] = sum(r.get("skipped", 0.0) for r in results)
    return means


def _explained(values: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that the values account for: 1 − Var(R − V) / Var(R); 0 where nothing
    varies."""
    spread = float(targets.var()) if len(targets) > 1 else 0.0
    return 1 - float((targets - values).var()) / spread if spread > 0 else 0.0
