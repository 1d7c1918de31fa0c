"""Turn a step's scored rollouts into optimizer steps, calling each part of `algo` in its order:

every model's log-probabilities → advantages → corrections → epochs × minibatches of selections, loss, aggregation,
gradient, AdamW
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.algo import kl
from hybrid_rl.algo.batch import RECOMPUTED, REFERENCE, TEACHER, VALUE, Given, Scored
from hybrid_rl.algo.declared import needs
from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.algo.parts import Parts, split
from hybrid_rl.algo.ratio import quantiles, ratio
from hybrid_rl.config import Config, KlPlace, OldLogprobs
from hybrid_rl.policy.critic import explained_variance
from hybrid_rl.policy.layout import sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import Fault, broken_weight, finite
from hybrid_rl.policy.optimizer import Optimizer, TrainingDiverged, make_optimizer
from hybrid_rl.policy.roles import Roles, make_critic, make_reference, make_teacher
from hybrid_rl.policy.rows import Update, as_on_main
from hybrid_rl.policy.update import Objective, mean_numbers, observe, update
from hybrid_rl.rollout.collector import Batch
from hybrid_rl.rollout.partial import lags, means_by_lag
from hybrid_rl.run_folder.bad_batch import BadBatch, BadBatches
from hybrid_rl.run_folder.reference import restore_reference, save_reference
from hybrid_rl.session import Session
from hybrid_rl.types import Rollout

MEASURED = ("loss", "entropy", "mismatch_kl", "clip_fraction", "grad_norm")  # by an update: None in a step without one
Numbers = dict[str, Any]  # an RL step's metrics: a float, or None if it was not measured; and why nothing was trained
Seen = tuple[list[int], Tensor]  # places of rollouts in the batch, and the log-ratios [M] of their tokens in an update
Advantages = dict[tuple[int, int], float]  # of (group id, index): the mean over the rollout's tokens


@dataclass(slots=True)
class StepInputs:
    """The inputs of all updates of a step: the batch, and the numbers of its N tokens that no update changes."""

    step: int
    batch: Batch
    minibatches: list[range]  # the rollouts' places in the batch
    given: Given
    kept: Tensor  # [N] bool: the tokens that a loss sees
    objective: Objective
    values: Tensor | None = None  # [N] the critic's predictions before the step
    targets: Tensor | None = None  # [N] what the critic should predict

    def seen(self) -> set[int]:
        """Return the places of the rollouts with a token whose loss is not 0."""
        other_terms = self.objective.entropy_coef or (self.objective.kl_coef and self.given.ref_logprobs is not None)
        return set(self.given.rollout[self.kept if other_terms else self.kept & (self.given.corrections != 0)].tolist())


def make_learner(s: Session, start: int) -> Learner:
    """Return the learner of a session's RL stage; `start` is the step after which it goes on, 0 for a new stage."""
    config, algo, policy, wanted = s.config, s.config.algo, s.policy, needs(s.config.algo.advantage)
    roles = Roles(policy, config.rollout.temperature)
    restore = partial(restore_reference, s.folder) if start else None
    save = partial(save_reference, s.folder, config.checkpoint.timeout)
    roles.reference = make_reference(policy, algo.reference, policy.folder, restore, save)
    if "teacher_logprobs" in wanted:
        assert algo.teacher is not None
        roles.teacher = make_teacher(policy, algo.teacher)
    if "values" in wanted:
        updates = config.rl.steps * algo.epochs * algo.minibatches
        saved = partial(s.resumed.restore_role, "critic") if s.resumed and start else None
        roles.critic = make_critic(policy, algo.critic, policy.folder, updates, saved)
    bad_batches = BadBatches(s.folder, config, s.progress, s.console.say)
    return Learner(config, roles, bad_batches.keep)


class Learner:
    """Train the policy, and the critic if there is one, with the parts that `algo` names.

    Collective: every rank gets the whole batch. `keep` reports a fault in a model's numbers and saves its batch.
    """

    def __init__(self, config: Config, roles: Roles, keep: Callable[[BadBatch, Fault, Policy], None]):
        self.config, self.algo, self.roles, self.keep = config, config.algo, roles, keep
        self.policy, self.critic, self.parts = roles.policy, roles.critic, Parts(config.algo)
        self.kl_coef = self.algo.kl.coef
        self.warmup = self.algo.critic.warmup_steps if self.critic else 0
        self.a_step = self.algo.epochs * self.algo.minibatches  # updates
        updates = max(0, config.rl.steps - self.warmup) * self.a_step
        self.optimizer = make_optimizer(self.policy, config.rl.optimizer, updates)

    def park(self) -> None:
        """Move the critic to host memory while the engine samples; the handover moves policy and optimizer."""
        if self.critic:
            self.critic.park()

    def state(self) -> dict[str, float]:
        """Return what a resumed run needs in addition to weights and moments."""
        return {"kl_coef": self.kl_coef}

    def restore(self, state: dict[str, float]) -> None:
        self.kl_coef = state["kl_coef"]

    def learn(self, batch: Batch, step: int) -> tuple[Numbers, Advantages]:
        """Take all updates of RL step `step`. Return its metrics and the rollouts' advantages.

        `batch.trained` then holds the rollouts that were used. Metrics are means over the updates, or None without one;
        "nothing_trained" then says why, by a name in console.NOTHING. The mismatch is taken before the first update,
        because later the policy's learning adds to it.
        """
        self._go_to(step)
        numbers: Numbers = dict.fromkeys((*MEASURED, *(["reference_kl"] if self.roles.reference else [])))
        rate = self.optimizer.learning_rate() if step > self.warmup else None
        numbers |= {"lr": rate, "skipped": 0.0, "trained": 0, "nothing_trained": None}
        if not batch.groups:
            return numbers | {"nothing_trained": "silent"}, {}
        minibatches = split([len(group.rollouts) for group in batch.groups], self.algo.minibatches)
        scored = self._score(batch, minibatches)
        advantages, targets = self.parts.advantage(scored)
        corrections, kept, dropped = self.parts.correct(scored)
        advantages, targets, corrections, kept = as_on_main(self.policy, advantages, targets, corrections, kept)
        columns = scored.named() | {"advantage": advantages, "correction": corrections}
        columns |= {} if targets is None else {"target": targets}
        if not finite(columns.values()):
            fault = self.roles.locate(columns, batch.rollouts)
            self.optimizer.skip(fault)
            bad = BadBatch("scored", step, batch.groups, range(len(batch.rollouts)), columns)
            self._keep(bad, fault, self.optimizer, self.policy)
            return numbers | {"skipped": 1.0, "nothing_trained": "not_finite"}, {}
        facts = scored.old_logprobs, scored.behaviour_logprobs, scored.rollout
        given = Given(advantages, *facts, corrections, kept.float(), 1.0, scored.ref_logprobs)
        objective = Objective.of(self.algo, self.kl_coef)
        inputs = StepInputs(step, batch, minibatches, given, kept, objective, scored.values, targets)
        results, log_ratios = self._take_updates(inputs)
        self._check_weights(step)
        numbers |= dropped | {"advantage_std": float(advantages[kept].std()) if kept.sum() > 1 else None}
        if scored.values is not None and targets is not None:
            numbers["explained_variance"] = explained_variance(scored.values[kept], targets[kept])
        numbers |= mean_numbers(results) | {"trained": len(batch.trained)}
        if not batch.trained:
            numbers["nothing_trained"] = _why_nothing(numbers, scored, inputs)
        if log_ratios:
            numbers |= {f"ratio_{name}": value for name, value in quantiles(_cat(log_ratios)).items()}
        if self.algo.old_logprobs == OldLogprobs.recomputed:
            numbers["mismatch_kl"] = float(mismatch_kl(scored.old_logprobs, scored.behaviour_logprobs).mean())
        if batch.partial and log_ratios:
            numbers |= _by_lag(batch, scored, log_ratios, corrections if self.parts.corrections else None)
        if target := self.algo.kl.target:
            numbers["kl_coef"] = self.kl_coef
            if log_ratios:
                self.kl_coef = kl.adapted(self.kl_coef, numbers["reference_kl"], target, self.algo.kl.horizon)
        means = scored.mean_of_rollout(advantages).tolist()
        if any((own != own[0]).any() for own in scored.per_rollout(advantages)):  # not one for the whole rollout
            _note_tokens(batch, range(len(batch.rollouts)), advantages=advantages)
        return numbers, {(r.group_id, r.index): a for r, a in zip(batch.rollouts, means, strict=True)}

    def _go_to(self, step: int, update: int = 0) -> None:
        """Set both learning-rate schedules to an update of a step; steps without an update advance them too."""
        self.optimizer.steps = max(0, (step - 1 - self.warmup) * self.a_step + update)
        if self.critic:
            self.critic.optimizer.steps = (step - 1) * self.a_step + update

    def _score(self, batch: Batch, minibatches: Sequence[range]) -> Scored:
        """Return the batch with every model's numbers, computed before the first update."""
        algo, rollouts, device = self.algo, batch.rollouts, self.policy.device
        behaviour = sampled_tokens(rollouts, device).behaviour_logprobs
        rows = [rollouts[i.start : i.stop] for i in minibatches]
        found = self.roles.columns(rows, recompute=algo.old_logprobs == OldLogprobs.recomputed)
        cut = [algo.mask_truncated and r.truncated for r in rollouts]
        names = dict.fromkeys(name for r in rollouts for name in r.reward_parts)
        parts = {name: [r.reward_parts.get(name, 0.0) for r in rollouts] for name in names}
        scored = Scored(
            outcomes=torch.tensor([r.reward for r in rollouts], dtype=torch.float32, device=device),
            group_sizes=[len(group.rollouts) for group in batch.groups],
            lengths=torch.tensor([r.sampled for r in rollouts], device=device),
            kept=~torch.tensor(cut, device=device),
            parts={name: torch.tensor(column, dtype=torch.float32, device=device) for name, column in parts.items()},
            behaviour_logprobs=behaviour,
            old_logprobs=found.get(RECOMPUTED, behaviour),
            ref_logprobs=found.get(REFERENCE),
            teacher_logprobs=found.get(TEACHER),
            values=found.get(VALUE),
            greedy=torch.tensor([batch.greedy[r.group_id] for r in rollouts], device=device) if batch.greedy else None,
        )
        if scored.ref_logprobs is not None and algo.kl.place == KlPlace.reward:
            scored.penalties = -self.kl_coef * self.parts.kl(scored.old_logprobs, scored.ref_logprobs)
        return scored

    def _take_updates(self, inputs: StepInputs) -> tuple[list[dict[str, float]], list[Seen]]:
        """Take every update of the step, and add its rollouts to `batch.trained`. Return numbers and log-ratios."""
        results, log_ratios, seen, max_tokens = [], list[Seen](), inputs.seen(), self.config.rollout.max_tokens
        for epoch in range(self.algo.epochs):
            for position, minibatch in enumerate(inputs.minibatches):
                members, own, chosen = self.parts.minibatch(inputs.given, inputs.kept, minibatch, max_tokens)
                if not members:
                    continue
                self._go_to(inputs.step, epoch * self.algo.minibatches + position)
                result, done = self._take_update(inputs, members, own, chosen)
                results.append(result)
                if done and done.log_ratios is not None:
                    log_ratios.append((members, done.log_ratios))
                    _note_tokens(inputs.batch, members, log_ratios=done.log_ratios, entropies=done.entropies)
                if not result["skipped"] and (self.critic or result["grad_norm"]):
                    rollouts = (inputs.batch.rollouts[i] for i in members if i in seen)
                    inputs.batch.trained |= {(r.group_id, r.index) for r in rollouts}
        return results, log_ratios

    def _take_update(
        self, inputs: StepInputs, members: list[int], given: Given, chosen: Tensor
    ) -> tuple[dict[str, float], Update | None]:
        """Take one update of the critic, if there is one, and after its warm-up one of the policy.

        Return their numbers, and the policy's update or None.
        """
        rollouts, result = [inputs.batch.rollouts[i] for i in members], dict[str, float]()
        facts = {"divisor": given.divisor, "kl_coef": self.kl_coef}
        bad = BadBatch("policy", inputs.step, inputs.batch.groups, members, given.columns(), facts)
        if self.critic:
            assert inputs.values is not None
            assert inputs.targets is not None
            values, targets = inputs.values[chosen], inputs.targets[chosen]
            done = self.critic.update(rollouts, values, targets, given)
            result |= done.numbers
            if done.fault:
                of_critic = replace(bad, kind="critic", columns={**bad.columns, "values": values, "targets": targets})
                self._keep(of_critic, done.fault, self.critic.optimizer, self.critic.model)
        if inputs.step <= self.warmup:
            return result, None
        given, selected = self._look(rollouts, given, inputs.kept[chosen])
        done = update(self.policy, self.optimizer, rollouts, given, inputs.objective, self.roles.temperature)
        if done.fault:
            self._keep(replace(bad, columns=given.columns()), done.fault, self.optimizer, self.policy)
        skipped = done.numbers["skipped"] + result.get("skipped", 0.0)
        return result | selected | done.numbers | {"skipped": skipped}, done

    def _look(self, rollouts: Sequence[Rollout], given: Given, kept: Tensor) -> tuple[Given, dict[str, float]]:
        """Return `given` with the results of selections and of the loss's look, for the policy as it is now.

        Return also the share of tokens selected, if there are selections.
        """
        if not self.parts.selections and not self.parts.look:
            return given, {}
        logprobs, entropy = observe(self.policy, rollouts, self.roles.temperature)
        weights, look = as_on_main(self.policy, *self.parts.select(given.at(kept, logprobs[kept], entropy[kept])))
        corrections, looked = given.corrections.clone(), None
        corrections[kept] *= weights
        if look is not None:
            looked = look.new_zeros(len(kept))
            looked[kept] = look
        selected = {"selected": float((weights != 0).float().mean())} if self.parts.selections else {}
        return replace(given, corrections=corrections, look=looked), selected

    def _keep(self, bad: BadBatch, fault: Fault, optimizer: Optimizer, model: Policy) -> None:
        """Report a skipped step's fault and save its batch. Raise TrainingDiverged after too many in a row."""
        self.keep(replace(bad, facts={**bad.facts, "scale": optimizer.scale}), fault, model)
        optimizer.check(fault)

    def _check_weights(self, step: int) -> None:
        """Raise TrainingDiverged for a non-finite weight, before it reaches the engine or a checkpoint."""
        for what, model in (("policy", self.policy), *([("critic", self.critic.model)] if self.critic else [])):
            if name := broken_weight(model):
                raise TrainingDiverged(
                    f"after the update of step {step} the {what}'s {name} is infinite or NaN; lower the learning rate. "
                    "The same command with resume=auto goes on from the last checkpoint"
                )


def _note_tokens(batch: Batch, members: Sequence[int], **columns: Tensor | None) -> None:
    """Keep columns [M] of the members' sampled tokens for the rollout files, over those of an earlier update."""
    rollouts = [batch.rollouts[i] for i in members]
    for name, column in columns.items():
        if column is not None:
            for r, own in zip(rollouts, column.cpu().split([r.sampled for r in rollouts]), strict=True):
                batch.tokens.setdefault((r.group_id, r.index), {})[name] = own.numpy()


def _cat(seen: Sequence[Seen]) -> Tensor:
    """Return the log-ratios of all tokens of all updates."""
    return torch.cat([log_ratios for _, log_ratios in seen])


def _by_lag(batch: Batch, scored: Scored, seen: Sequence[Seen], corrections: Tensor | None) -> Numbers:
    """Return means by the number of versions that tokens are behind: of the loss's ratio, and of a correction's weight.

    Also the mismatch of trainer and engine, of tokens that are not behind: for others the policy's learning adds to it.
    """
    assert batch.partial
    of = [lags(r, batch.partial.version) for r in batch.rollouts]
    ratios = ratio(log_ratios := _cat(seen), torch.zeros_like(log_ratios))
    trained = np.concatenate([of[i] for members, _ in seen for i in members])
    numbers: Numbers = {"ratio_by_lag": means_by_lag(trained, ratios.cpu().numpy())}
    everything = np.concatenate(of)
    if corrections is not None:
        numbers["correction_by_lag"] = means_by_lag(everything, corrections.cpu().numpy())
    train, behaviour, behind = scored.old_logprobs, scored.behaviour_logprobs, everything
    if train is behaviour:  # what the trainer computed is known from the first update
        members, train = seen[0]
        behaviour, behind = torch.zeros_like(train), np.concatenate([of[i] for i in members])
    fresh = torch.from_numpy(behind == 0).to(train.device)
    return numbers | {"mismatch_kl": float(mismatch_kl(train, behaviour)[fresh].mean()) if fresh.any() else None}


def _why_nothing(numbers: Numbers, scored: Scored, inputs: StepInputs) -> str:
    """Return the reason, a name in console.NOTHING, for which a batch with groups was not trained."""
    if numbers["skipped"]:
        return "not_finite"
    if not scored.kept.any():
        return "truncated"
    return "zero_gradient" if inputs.seen() else "corrected"
