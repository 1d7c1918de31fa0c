"""Evaluate on every held-out task once (or eval.samples times), with the engine, phases and scoring of training.

To evaluate a model and do nothing else:

    python -m hybrid_rl.evaluate +recipe=mine model.path=outputs/mine/<run>/final
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid_rl.engine.base import Sampling
from hybrid_rl.report.console import eval_line, source_lines
from hybrid_rl.report.step_metrics import mean, mean_measures, pass_at_k, spread
from hybrid_rl.rollout.generate import fault_metrics, first_faults, reward_faults
from hybrid_rl.session import Session
from hybrid_rl.types import Group, Rollout

CONFIDENT = statistics.NormalDist().inv_cdf(0.975)  # standard errors of a 95 % interval
ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1: a reward of weighted parts still reaches eval.pass_reward


def evaluate(s: Session, name: str, step: int = 0) -> float:
    """Return the mean reward over the held-out tasks; each task has the same random stream at every evaluation.

    With eval.greedy each task is also decoded greedily, once. A failed reward counts as 0 and is reported: without it
    the mean would be too high. The engine must be awake.
    """
    config, rollout = s.config.eval, s.config.rollout
    tasks = list(s.tasks.eval)[: config.max_tasks or None]
    sampling = Sampling(config.temperature, rollout.top_k, rollout.top_p, rollout.max_tokens)

    def sampled(samples: int, sampling: Sampling) -> list[Group]:
        groups = [
            s.generator.new_group(i, task, samples, rollout.max_prompt_tokens, s.config.seed, "eval", task.id)
            for i, task in enumerate(tasks)
        ]
        with s.console.progress("evaluating", len(tasks) * samples) as advance:
            s.generator.fill(groups, sampling, advance)
        return groups

    with s.progress.clock.timed("eval"):
        groups = sampled(config.samples, sampling)
        greedy = sampled(1, replace(sampling, temperature=0.0)) if config.greedy else []
    faults = reward_faults([*groups, *greedy])
    rollouts = [r for group in groups for r in group.rollouts]
    values = {
        "name": name,
        "step": step,
        **scores(groups, config.pass_reward),
        **({"greedy": scores(greedy, config.pass_reward)} if greedy else {}),
        "length": statistics.fmean(r.sampled for r in rollouts),
        "truncated": statistics.fmean(r.finish_reason == "length" for r in rollouts),
        "tasks": len(tasks),
        "samples": config.samples,
        **({"dropped_tasks": s.tasks.dropped["eval"]} if "eval" in s.tasks.dropped else {}),
        "reward_errors": faults.total(),
        **fault_metrics(faults),
    }
    file = name if name != "step" else f"step_{step:04d}"
    s.rollouts.save(f"eval_{file}", groups)
    if greedy:
        s.rollouts.save(f"greedy_{file}", greedy)
    s.metrics.write("eval", **values)
    s.console.reward_faults(first_faults([*groups, *greedy]))
    s.console.say(eval_line(values))
    if name == "model":
        for line in source_lines(values):
            s.console.say(f"  {line}")
    progress, reward = s.progress, values["reward"]
    progress.evaluations[name] = reward
    if s.config.rl.keep_best and name in ("step", "rl") and (progress.best is None or reward > progress.best["reward"]):
        progress.best = {"step": step, "reward": reward}
    return reward


def scores(groups: Sequence[Group], pass_reward: float) -> dict[str, Any]:
    """Return the scores of the groups, which have one size n; a rollout without a reward counts as 0.

    reward: the mean, avg@n, and interval: its 95 % interval over tasks. correct: share of samples whose reward is at
    least `pass_reward`. measures: the mean of each. If n > 1, pass_at: for k = 1, 2, 4, … ≤ n the probability that k
    samples hold a right one, a mean over tasks, and maj_at n: see `majority`. If tasks have two sources or more,
    sources: mean reward of each, and by_source: all of this for each.
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
    rewards = [[r.reward or 0.0 for r in group.rollouts] for group in groups]
    every = [reward for of_task in rewards for reward in of_task]
    right = [[_right(r, pass_reward) for r in group.rollouts] for group in groups]
    samples = len(rewards[0])
    ks = [2**i for i in range(samples.bit_length())] if samples > 1 else []
    votes = [majority(group, pass_reward) for group in groups]
    measures = mean_measures(r for group in groups for r in group.rollouts)
    return {
        "reward": mean(every),
        "reward_std": spread(every),
        "interval": interval([mean(of_task) for of_task in rewards]),
        "correct": statistics.fmean(statistics.fmean(of_task) for of_task in right),
        **({"measures": measures} if measures else {}),
        **(
            {"pass_at": {str(k): statistics.fmean(pass_at_k(samples, sum(c), k) for c in right) for k in ks}}
            if ks
            else {}
        ),
        **(
            {"maj_at": {str(samples): statistics.fmean(v or 0.0 for v in votes)}}
            if ks and any(v is not None for v in votes)
            else {}
        ),
    }


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


if __name__ == "__main__":
    from hybrid_rl.run import main

    sys.exit(main([*sys.argv[1:], "sft.steps=0", "rl.steps=0"]))
