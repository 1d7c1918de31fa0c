"""The scores of an evaluation: mean reward, share of correct samples, pass@k and maj@n, with intervals, by source."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hybrid_rl.report.step_metrics import mean, mean_measures, pass_at_k, spread
from hybrid_rl.types import Group, Rollout

CONFIDENT = statistics.NormalDist().inv_cdf(0.975)  # standard errors of a 95 % interval
ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1: a reward of weighted parts still reaches eval.pass_reward


def scores(groups: Sequence[Group], pass_reward: float) -> dict[str, Any]:
    """Return the scores of the groups, which have one size n; a rollout without a reward counts as 0.

    reward: the mean, avg@n, and interval: its 95 % interval over tasks. correct: share of samples whose reward is at
    least `pass_reward`. measures: the mean of each. If n > 1, pass_at: for k = 1, 2, 4, … ≤ n the probability that k
    samples hold a right one, a mean over tasks, and maj_at n: see `majority`. intervals: the 95 % interval over tasks of
    correct, pass@k and maj@n. If tasks have two sources or more, sources: mean reward of each, and by_source: all of
    this for each.
    """
    found = _scores(groups, pass_reward)
    sources = sorted({group.task.source or "unnamed" for group in groups})
    if len(sources) > 1:
        by_source = {
            source: _scores([g for g in groups if (g.task.source or "unnamed") == source], pass_reward)
            for source in sources
        }
        found["sources"] = {source: values["reward"] for source, values in by_source.items()}
        found["by_source"] = by_source
    return found


def _scores(groups: Sequence[Group], pass_reward: float) -> dict[str, Any]:
    every = [r.reward or 0.0 for group in groups for r in group.rollouts]
    values = task_values(groups, pass_reward)
    means = {name: statistics.fmean(of_tasks) for name, of_tasks in values.items() if name != "reward"}
    measures = mean_measures(r for group in groups for r in group.rollouts)
    pass_at, maj_at = (
        {name.partition("@")[2]: value for name, value in means.items() if name.startswith(kind)}
        for kind in ("pass@", "maj@")
    )
    intervals = {name: interval(of_tasks) for name, of_tasks in values.items() if name != "reward"}
    return {
        "reward": mean(every),
        "reward_std": spread(every),
        "interval": interval(values["reward"]),
        "correct": means["correct"],
        **({"measures": measures} if measures else {}),
        **({"pass_at": pass_at} if pass_at else {}),
        **({"maj_at": maj_at} if maj_at else {}),
        **({"intervals": intervals} if len(groups) > 1 else {}),
    }


def task_values(groups: Sequence[Group], pass_reward: float) -> dict[str, list[float]]:
    """Return the value of each task by the score's name: reward, correct, and for n > 1 samples pass@k and maj@n.

    There is a maj@n only if the reward found an answer in some completion.
    """
    values: dict[str, list[float]] = {"reward": [mean([r.reward or 0.0 for r in group.rollouts]) for group in groups]}
    right = [[_right(r, pass_reward) for r in group.rollouts] for group in groups]
    values["correct"] = [statistics.fmean(of_task) for of_task in right]
    if (samples := len(groups[0].rollouts)) > 1:
        for k in (2**i for i in range(samples.bit_length())):
            values[f"pass@{k}"] = [pass_at_k(samples, sum(of_task), k) for of_task in right]
        votes = [majority(group, pass_reward) for group in groups]
        if any(vote is not None for vote in votes):
            values[f"maj@{samples}"] = [vote or 0.0 for vote in votes]
    return values


def _right(rollout: Rollout, pass_reward: float) -> bool:
    return rollout.reward is not None and rollout.reward >= pass_reward - ROUNDING


def interval(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of the mean of tasks' values, from their standard error; None for one task."""
    if len(values) < 2:
        return None
    middle, error = mean(values), spread(values) / math.sqrt(len(values) - 1)
    return [middle - CONFIDENT * error, middle + CONFIDENT * error]


def majority(group: Group, pass_reward: float) -> float | None:
    """Return the share of right samples among those that give the task's most frequent answer.

    Several answers that are as frequent count alike. The answers are those that the reward extracted; None without any.
    """
    votes = Counter(r.extracted for r in group.rollouts if r.extracted is not None)
    most = max(votes.values(), default=0)
    shares = [
        statistics.fmean(_right(r, pass_reward) for r in group.rollouts if r.extracted == answer)
        for answer, count in votes.items()
        if count == most
    ]
    return statistics.fmean(shares) if shares else None
