"""Evaluate on every held-out task once (or eval.samples times), with the engine, phases and scoring of training.

To evaluate a model and do nothing else:

    python -m hybrid_rl.evaluate +recipe=mine model.path=outputs/mine/<run>/final
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from hybrid_rl.engine.base import Sampling
from hybrid_rl.report.console import eval_line
from hybrid_rl.report.step_metrics import mean, mean_by_source, pass_at_k, spread
from hybrid_rl.rollout.generate import fault_metrics, first_faults, reward_faults
from hybrid_rl.session import Session
from hybrid_rl.types import Group

ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1: a reward of weighted parts still reaches eval.pass_reward


def evaluate(s: Session, name: str, step: int = 0) -> float:
    """Return the mean reward over the held-out tasks; each task has the same random stream at every evaluation.

    A failed reward counts as 0 and is reported: without it the mean would be too high. The engine must be awake.
    """
    config, rollout = s.config.eval, s.config.rollout
    tasks = list(s.tasks.eval)[: config.max_tasks or None]
    generator = s.generator
    groups = [
        generator.new_group(i, task, config.samples, rollout.max_prompt_tokens, s.config.seed, "eval", task.id)
        for i, task in enumerate(tasks)
    ]
    sampling = Sampling(config.temperature, rollout.top_k, rollout.top_p, rollout.max_tokens)
    with (
        s.progress.clock.timed("eval"),
        s.console.progress("evaluating", len(tasks) * config.samples) as advance,
    ):
        errors = generator.fill(groups, sampling, advance)
    rollouts = [r for group in groups for r in group.rollouts]
    values = {
        "name": name,
        "step": step,
        **scores(groups, config.pass_reward),
        "length": statistics.fmean(r.sampled for r in rollouts),
        "truncated": statistics.fmean(r.finish_reason == "length" for r in rollouts),
        "tasks": len(tasks),
        "samples": config.samples,
        "reward_errors": errors,
        **fault_metrics(reward_faults(groups)),
    }
    s.rollouts.save(f"eval_{name}" if name != "step" else f"eval_step_{step:04d}", groups)
    s.metrics.write("eval", **values)
    s.console.reward_faults(first_faults(groups))
    s.console.say(eval_line(values))
    progress, reward = s.progress, values["reward"]
    progress.evaluations[name] = reward
    if s.config.rl.keep_best and name in ("step", "rl") and (progress.best is None or reward > progress.best["reward"]):
        progress.best = {"step": step, "reward": reward}
    return reward


def scores(groups: Sequence[Group], pass_reward: float) -> dict[str, Any]:
    """Return the scores of the groups, which have one size n; a rollout without a reward counts as 0.

    reward: the mean, avg@n. correct: share of samples whose reward is at least `pass_reward`. If n > 1, pass_at: for
    k = 1, 2, 4, … ≤ n the probability that k samples hold a right one, a mean over tasks. If tasks have two sources or
    more, sources: mean reward of each.
    """
    rewards = [[r.reward or 0.0 for r in group.rollouts] for group in groups]
    every = [reward for of_task in rewards for reward in of_task]
    least = pass_reward - ROUNDING
    right = [sum(r.reward is not None and r.reward >= least for r in group.rollouts) for group in groups]
    samples = len(rewards[0])
    ks = [2**i for i in range(samples.bit_length())] if samples > 1 else []
    sources = mean_by_source(
        (group.task.source, reward) for group, of_task in zip(groups, rewards, strict=True) for reward in of_task
    )
    return {
        "reward": mean(every),
        "reward_std": spread(every),
        "correct": sum(right) / len(every),
        **({"pass_at": {str(k): statistics.fmean(pass_at_k(samples, c, k) for c in right) for k in ks}} if ks else {}),
        **({"sources": sources} if len(sources) > 1 else {}),
    }


if __name__ == "__main__":
    from hybrid_rl.run import main

    sys.exit(main([*sys.argv[1:], "sft.steps=0", "rl.steps=0"]))
