"""What a step is judged by: the numbers of its rollouts and phases, and the alarms that say when training goes wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from hybrid_rl.engine.base import EngineStats
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.phases import Phases
from hybrid_rl.rollout.collector import Batch
from hybrid_rl.rollout.generate import fault_metrics
from hybrid_rl.types import Rollout

FIRST = 5  # measured steps that tell how a run began
CALM = 5  # steps in a row without its cause, after which an alarm is over: a value that swings around a limit is told of once


def rollout_metrics(batch: Batch) -> dict[str, Any]:
    """Over all rollouts that were sampled, the silent groups included: training data alone would flatter or shame the policy."""
    rollouts = [r for group in batch.all_groups for r in group.rollouts]
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [r.reward for r in scored if r.reward is not None]
    names = sorted({name for r in scored for name in r.reward_parts})
    parts = {name: [r.reward_parts.get(name, 0.0) for r in scored] for name in names}
    sources = mean_by_source(
        (g.task.source, r.reward) for g in batch.all_groups for r in g.rollouts if r.reward is not None
    )
    return {
        "reward": mean(rewards),
        "reward_std": spread(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "parts": {name: mean(values) for name, values in parts.items()},
        "parts_std": {name: spread(values) for name, values in parts.items()},
        **({"sources": sources} if len(sources) > 1 else {}),
        "length": statistics.fmean(r.sampled for r in rollouts),
        "length_max": max(r.sampled for r in rollouts),
        "truncated": statistics.fmean(r.finish_reason == "length" for r in rollouts),
        "repetition": statistics.fmean(map(repetition, rollouts)),
        "rollouts": len(batch.rollouts),
        "silent_groups": batch.silent_groups,
        "missing_groups": batch.missing_groups,
        "replacement_rounds": batch.replacement_rounds,
        "reward_errors": batch.reward_errors,
        **fault_metrics(batch.reward_faults),
    }


def phase_metrics(phases: Phases, batch: Batch, ranks: Ranks) -> dict[str, Any]:
    """Seconds of each phase and memory around it, of the rank that took or held most; tokens/s counts every sampled token."""
    sampled = sum(r.sampled for group in batch.all_groups for r in group.rollouts)
    everyone = ranks.all_gather(phases)
    slowest = max(p.total for p in everyone)
    return {
        "seconds": {name: max(p.seconds[name] for p in everyone) for name in phases.seconds},
        "memory": {name: [max(p.memory[name][side] for p in everyone) for side in (0, 1)] for name in phases.memory},
        "memory_gib": max(p.peak_gib for p in everyone),
        "tokens_per_second": sampled / slowest,
    }


def prompt_metrics(before: EngineStats, now: EngineStats, ranks: Ranks) -> dict[str, float]:
    """Prompt tokens of a step's requests, those that had to be computed, and the share that had not, over all ranks' engines."""
    asked = now.prompt_tokens - before.prompt_tokens
    everyone = ranks.all_gather((asked, now.computed_prompt_tokens - before.computed_prompt_tokens))
    prompt, computed = (sum(counts) for counts in zip(*everyone, strict=True))
    step = EngineStats(prompt_tokens=prompt, computed_prompt_tokens=computed)
    return {"prompt_tokens": prompt, "computed_prompt_tokens": computed, "cache_hit_rate": step.cache_hit_rate}


def mean(values: Sequence[float]) -> float:
    """The mean, also of numbers whose sum is beyond a float."""
    size = _size(values)
    return statistics.fmean(value / size for value in values) * size


def spread(values: Sequence[float]) -> float:
    """The standard deviation of the population, also of numbers whose squares are beyond a float."""
    size = _size(values)
    return statistics.pstdev([value / size for value in values]) * size


def _size(values: Sequence[float]) -> float:
    """A power of two, by which floats can be divided exactly; 1 unless the values are huge."""
    largest = max(map(abs, values))
    return 1.0 if largest < 1e150 else 2.0 ** (math.frexp(largest)[1] - 1)


def mean_by_source(rewards: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean reward of each source, from (task source, reward) of each rollout; sources in the order of their names."""
    found: dict[str, list[float]] = {}
    for source, reward in rewards:
        found.setdefault(source or "unnamed", []).append(reward)
    return {source: mean(found[source]) for source in sorted(found)}


def repetition(rollout: Rollout) -> float:
    """Share of the sampled tokens' 4-grams that occurred before in the same completion: 0 for one that never repeats, towards 1 for a loop.

    Exact. Two pairs make a 4-gram: pairs are renumbered first, so that a 4-gram fits 64 bits whatever the vocabulary. Thousands of
    completions of thousands of tokens are counted each step: in arrays this takes half the time of a set of tuples.
    """
    tokens = np.fromiter(compress(rollout.token_ids, rollout.loss_mask), dtype=np.int64)
    if len(tokens) < 5:
        return 0.0
    pairs = np.unique(tokens[:-1] << 32 | tokens[1:], return_inverse=True)[1]
    grams = np.sort(pairs[:-2] << 32 | pairs[2:])
    return float(np.count_nonzero(grams[1:] == grams[:-1]) / len(grams))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c right ones: 1 − C(n−c,k)/C(n,k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), in whole numbers up to one division.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 ≤ k ≤ n, and there are n={n} samples")
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} samples cannot be right")
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


@dataclass(slots=True)
class Alarms:
    """Says once when a run begins to go wrong, in a line with the value, its limit and where to look.

    What it remembers of earlier steps is in `state()`, so that a resumed run says what one never killed says.
    """

    entropy_share: float = 0.1  # of the first steps' mean; the entropy of a run that learns well falls to about a fifth
    entropy_floor: float = 0.05  # nats a token; both must be undercut, since a policy may begin with little
    mismatch: float = 1e-2  # nats a token, for `steps` steps in a row; prime-rl's bound in its own tests
    mismatch_growth: float = 10.0  # times the median of the first steps, at once, where that is more than:
    mismatch_floor: float = 1e-3  # nats a token; bfloat16 engines of dense models stay below (1e-5 to 1e-3)
    dropped: float = 0.9  # share of tokens that corrections drop
    truncated: float = 0.5  # share of completions
    repetition: float = 0.5  # share of 4-grams, mean over completions
    steps: int = 3  # in a row that a mismatch or a constant part must last
    _first: dict[str, list[float]] = field(default_factory=dict, init=False)  # the first measured values
    _lasting: dict[str, int] = field(default_factory=dict, init=False)  # steps in a row that something has lasted
    _varied: list[str] = field(default_factory=list, init=False)  # parts of the reward that once told rollouts apart
    _active: dict[str, int] = field(
        default_factory=dict, init=False
    )  # alarms that were given, and for how many steps they are calm

    def check(self, values: dict[str, Any]) -> dict[str, str]:
        """Alarms that begin with this step: short name → line. `values` are the step's metrics; what is missing is not judged."""
        began = {}
        for name, line in self._judged(values):
            if line and name not in self._active:
                began[name] = line
            if line:
                self._active[name] = 0
            elif name in self._active:
                self._active[name] += 1
                if self._active[name] == CALM:
                    del self._active[name]
        return began

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "first": {name: list(values) for name, values in self._first.items()},
            "lasting": dict(self._lasting),
            "varied": list(self._varied),
            "active": dict(self._active),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._first = {name: list(values) for name, values in state["first"].items()}
        self._lasting, self._varied, self._active = dict(state["lasting"]), list(state["varied"]), dict(state["active"])

    def _judged(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """(short name, line, empty where all is well) of each alarm that this step's values can be judged by."""
        yield from self._entropy(_measured(values, "entropy"))
        yield from self._mismatch(_measured(values, "mismatch_kl"))
        if (share := _measured(values, "dropped")) is not None:
            line = f"algo.correction drops {share:.1%} of tokens, limit {self.dropped:.0%}: hardly anything is learned; look at the mismatch"
            yield "dropped", line if share >= self.dropped else ""
        yield from self._reward(values)
        if (share := _measured(values, "truncated")) is not None:
            line = f"{share:.1%} of completions truncated, limit {self.truncated:.0%}: raise rollout.max_tokens, or see if they never end"
            yield "truncated", line if share >= self.truncated else ""
        if (share := _measured(values, "repetition")) is not None:
            line = f"repetition {share:.1%}, limit {self.repetition:.0%}: completions say the same again and again; read this step's rollouts"
            yield "repetition", line if share >= self.repetition else ""

    def _entropy(self, entropy: float | None) -> Iterator[tuple[str, str]]:
        if entropy is None:
            return
        if first := self._began("entropy", entropy):
            began = statistics.fmean(first)
            limit = min(self.entropy_floor, self.entropy_share * began)
            line = (
                f"entropy {entropy:.2g} nats a token, limit {limit:.2g}, began with {began:.2g}: sampling finds nothing new; "
                "see if the task is solved, else lower rl.optimizer.lr or raise clip_high"
            )
            yield "entropy", line if entropy < limit else ""

    def _mismatch(self, kl: float | None) -> Iterator[tuple[str, str]]:
        if kl is None:
            return
        first = self._began("mismatch_kl", kl)
        growth = (
            max(self.mismatch_floor, self.mismatch_growth * statistics.median(first))
            if len(first) == FIRST
            else math.inf
        )
        lasting = self._last("mismatch_kl", kl > self.mismatch)
        line = ""
        if lasting >= self.steps:
            line = f"limit {self.mismatch:.0e} for {self.steps} steps"
        elif kl > growth:
            line = f"limit {growth:.1e}, began with {statistics.median(first):.1e}"
        cause = "engine and trainer compute different probabilities; check with handover.verify=true, then compare their precision"
        yield "mismatch_kl", f"mismatch KL {kl:.1e} nats a token, {line}: {cause}" if line else ""

    def _reward(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
        std = _measured(values, "reward_std")
        if std is not None:
            line = f"reward {values['reward']:.3g} in every rollout, limit: s.d. above 0: nothing to learn from; see how they are scored"
            yield "reward", line if std == 0 else ""
        parts_std = values.get("parts_std", {})
        vary = [name for name, std in parts_std.items() if std > 0]
        self._varied += [name for name in vary if name not in self._varied]
        for name in parts_std:
            if name in self._varied:
                lasting = self._last(f"part:{name}", bool(vary) and name not in vary)
                line = (
                    f"reward part {name} {values['parts'][name]:.3g} in every rollout, limit {self.steps} such steps: "
                    "it tells no answers apart any more; see if it is learned, gamed or broken"
                )
                yield f"part:{name}", line if lasting >= self.steps else ""

    def _began(self, name: str, value: float) -> list[float]:
        """The first values measured before this one, at most FIRST; this one is remembered if it is among them."""
        first = list(self._first.setdefault(name, []))
        if len(first) < FIRST:
            self._first[name].append(value)
        return first

    def _last(self, name: str, holds: bool) -> int:
        """For how many steps in a row, this one included, something holds."""
        self._lasting[name] = self._lasting.get(name, 0) + 1 if holds else 0
        return self._lasting[name]


def _measured(values: dict[str, Any], key: str) -> float | None:
    """The value, None where it is missing or not finite."""
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
