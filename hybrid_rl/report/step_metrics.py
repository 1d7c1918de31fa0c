"""Compute the metrics of an RL step from its rollouts and phases."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hybrid_rl.engine.base import EngineStats
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.phases import Phases
from hybrid_rl.rollout.collector import Batch
from hybrid_rl.rollout.generate import fault_metrics
from hybrid_rl.rollout.partial import lags, shares_by_lag
from hybrid_rl.types import Group, Rollout


def rollout_metrics(batch: Batch) -> dict[str, Any]:
    """Return the metrics of a step's rollouts: rewards, lengths, truncation, repetition and counts.

    They cover all sampled rollouts, dropped groups included: the trained ones alone would bias rewards.
    """
    rollouts = [r for group in batch.all_groups for r in group.rollouts]
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [r.reward for r in scored if r.reward is not None]
    names = sorted({name for r in scored for name in r.reward_parts})
    measures = mean_measures(scored)
    parts = {name: [r.reward_parts.get(name, 0.0) for r in scored] for name in names}
    sources = mean_by_source(
        (g.task.source, r.reward) for g in batch.all_groups for r in g.rollouts if r.reward is not None
    )
    drawn = _by_source(batch.all_groups)
    return {
        "reward": mean(rewards),
        "reward_std": spread(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "parts": {name: mean(values) for name, values in parts.items()},
        "parts_std": {name: spread(values) for name, values in parts.items()},
        **({"measures": measures} if measures else {}),
        **({"sources": sources} if len(sources) > 1 else {}),
        **({"groups_drawn": drawn, "groups_kept": _by_source(batch.groups)} if len(drawn) > 1 else {}),
        **({"curriculum": batch.curriculum} if batch.curriculum else {}),
        "length": statistics.fmean(r.sampled for r in rollouts),
        "length_max": max(r.sampled for r in rollouts),
        "truncated": statistics.fmean(r.truncated for r in rollouts),
        **turn_metrics(rollouts),
        "repetition": statistics.fmean(map(repetition, rollouts)),
        "rollouts": len(batch.rollouts),
        "silent_groups": batch.silent_groups,
        "missing_groups": batch.missing_groups,
        "replacement_rounds": batch.replacement_rounds,
        "reward_errors": batch.reward_errors,
        **fault_metrics(batch.reward_faults),
        **_partial_metrics(batch, rollouts),
    }


def _partial_metrics(batch: Batch, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return what rollout.oversample did in the step: the share of tokens by versions behind, and counts."""
    if not (partial := batch.partial):
        return {}
    found = np.concatenate([lags(r, partial.version) for r in rollouts])
    return {
        "lag": shares_by_lag(found),
        "lag_mean": float(found.mean()),
        "continued_rollouts": partial.continued,
        "discarded_rollouts": partial.discarded,
        "groups_left": partial.left,
    }


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return what conversations add: mean number of answers and of tokens replied, and rollouts by what ended them.

    {} if every rollout is a single answer.
    """
    turns = [r.turns for r in rollouts]
    if max(turns) < 2:
        return {}
    observed = statistics.fmean(len(r.token_ids) - r.prompt_length - r.sampled for r in rollouts)
    ends = Counter(r.finish_reason or "unknown" for r in rollouts)
    return {"turns": statistics.fmean(turns), "observed": observed, "ends": dict(sorted(ends.items()))}


def phase_metrics(phases: Phases, batch: Batch, ranks: Ranks) -> dict[str, Any]:
    """Return seconds and memory (GiB) of each phase, the maximum over ranks, and sampled tokens/s. Collective.

    On a GPU also what torch holds, free blocks included, and what all processes hold together; None on the CPU.
    """
    ended = sum(r.sampled for group in batch.all_groups for r in group.rollouts)
    sampled = batch.partial.tokens if batch.partial else ended
    everyone = ranks.all_gather(phases)
    slowest = max(p.total for p in everyone)
    return {
        "seconds": {name: max(p.seconds[name] for p in everyone) for name in phases.seconds},
        "memory": {name: [max(p.memory[name][side] for p in everyone) for side in (0, 1)] for name in phases.memory},
        "memory_gib": max(p.peak_gib for p in everyone),
        "memory_reserved_gib": max((p.reserved_gib for p in everyone if p.reserved_gib is not None), default=None),
        "memory_device_gib": max((p.device_gib for p in everyone if p.device_gib is not None), default=None),
        "tokens_per_second": sampled / slowest,
    }


def prompt_metrics(before: EngineStats, now: EngineStats, ranks: Ranks) -> dict[str, float]:
    """Return a step's prompt tokens, those computed, and the share found in the cache, over all engines. Collective."""
    asked = now.prompt_tokens - before.prompt_tokens
    everyone = ranks.all_gather((asked, now.computed_prompt_tokens - before.computed_prompt_tokens))
    prompt, computed = (sum(counts) for counts in zip(*everyone, strict=True))
    step = EngineStats(prompt_tokens=prompt, computed_prompt_tokens=computed)
    return {"prompt_tokens": prompt, "computed_prompt_tokens": computed, "cache_hit_rate": step.cache_hit_rate}


def mean(values: Sequence[float]) -> float:
    """Return the mean, also of numbers whose sum overflows a float."""
    size = _size(values)
    return statistics.fmean(value / size for value in values) * size


def spread(values: Sequence[float]) -> float:
    """Return the population's standard deviation, also of numbers whose squares overflow a float."""
    size = _size(values)
    return statistics.pstdev([value / size for value in values]) * size


def _size(values: Sequence[float]) -> float:
    """Return a power of two by which the values are divided, exactly, before summing; 1 unless they are huge."""
    largest = max(map(abs, values))
    return 1.0 if largest < 1e150 else 2.0 ** (math.frexp(largest)[1] - 1)


def _by_source(groups: Iterable[Group]) -> dict[str, int]:
    """Return the number of groups of each source, sorted by name."""
    return dict(sorted(Counter(group.task.source or "unnamed" for group in groups).items()))


def mean_by_source(rewards: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean reward of each source, sorted by name, from (task source, reward) of each rollout."""
    found: dict[str, list[float]] = {}
    for source, reward in rewards:
        found.setdefault(source or "unnamed", []).append(reward)
    return {source: mean(found[source]) for source in sorted(found)}


def mean_measures(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the mean of each measure, sorted by name, over the rollouts that have it."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.measures.items():
            found.setdefault(name, []).append(value)
    return {name: mean(found[name]) for name in sorted(found)}


def repetition(rollout: Rollout) -> float:
    """Return the share of the sampled 4-grams that occurred before in the same completion, from 0 to 1.

    Exact: pairs of tokens are renumbered, so that a 4-gram (two pairs) fits into 64 bits with any vocabulary. Arrays
    take half the time of a set of tuples, and every completion of every step is counted.
    """
    tokens = rollout.token_ids[rollout.loss_mask].astype(np.int64)
    if len(tokens) < 5:
        return 0.0
    pairs = np.unique(tokens[:-1] << 32 | tokens[1:], return_inverse=True)[1]
    grams = np.sort(pairs[:-2] << 32 | pairs[2:])
    return float(np.count_nonzero(grams[1:] == grams[:-1]) / len(grams))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without replacement, hold a correct one: 1 − C(n−c,k)/C(n,k).

    c of the n samples are correct. This is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1),
    computed in integers up to one division. Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 ≤ k ≤ n, and there are n={n} samples")
    if not 0 <= c <= n:
        raise ValueError(f"c={c} of n={n} samples cannot be correct")
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws
