"""Evaluation: every held-out task once (or eval.samples times), through the same engine, phases and scoring as training."""

from __future__ import annotations

import statistics

from hybrid_rl.console import eval_line
from hybrid_rl.engine.base import Sampling
from hybrid_rl.rollout.sample import make_group, sample_groups
from hybrid_rl.session import Session


def evaluate(s: Session, name: str, step: int = 0) -> float:
    """Mean reward over the held-out tasks, with a random stream per task that is the same at every evaluation.

    A reward that failed counts as 0 here, and is reported: leaving it out would flatter the mean. The engine must be awake.
    """
    config, rollout = s.config.eval, s.config.rollout
    tasks = list(s.tasks.eval)[: config.max_tasks or None]
    tokenizer = s.policy.tokenizer
    groups = [
        make_group(i, task, config.samples, tokenizer, rollout.max_prompt_tokens, s.config.seed, "eval", task.id)
        for i, task in enumerate(tasks)
    ]
    sampling = Sampling(config.temperature, rollout.top_k, rollout.top_p, rollout.max_tokens)
    with s.timed("eval"), s.console.progress("evaluating", len(tasks) * config.samples) as advance:
        errors = sample_groups(s.engine, groups, sampling, tokenizer, s.scorer, s.ranks, advance, s.revive_engine)
    rollouts = [r for group in groups for r in group.rollouts]
    rewards = [r.reward or 0.0 for r in rollouts]
    reward = statistics.fmean(rewards)
    values = {
        "name": name, "step": step, "reward": reward, "reward_std": statistics.pstdev(rewards),
        "length": statistics.fmean(r.sampled for r in rollouts),
        "truncated": statistics.fmean(r.finish_reason == "length" for r in rollouts),
        "tasks": len(tasks), "reward_errors": errors,
    }  # fmt: skip
    stem = f"eval_{name}" if name != "step" else f"eval_step_{step:04d}"
    s.save_rollouts(stem, groups)
    s.metrics.write("eval", **values)
    s.console.say(eval_line(values))
    s.evaluations[name] = reward
    return reward
