"""The loop: hand the weights over, sample, give the KV cache back, train. Read it top to bottom; this is the system."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from hybrid_rl.console import step_line
from hybrid_rl.engine.base import EngineStats
from hybrid_rl.evaluate import evaluate
from hybrid_rl.handover import take_back
from hybrid_rl.learner import Learner
from hybrid_rl.memory import Phases
from hybrid_rl.ranks import Ranks
from hybrid_rl.rollout.collector import Batch, Collector
from hybrid_rl.session import Session


def train_rl(s: Session) -> None:
    """rl.steps steps of synchronous GRPO. Goes on from a checkpoint of this stage where the session has one.

    Every rank runs this: it samples its share, and trains its share, of what all of them know.
    """
    config, policy, engine = s.config.rl, s.policy, s.engine
    start = s.resumed_step("rl")
    learner = Learner(s, start)
    optimizer = learner.optimizer
    collector = Collector(
        engine, s.tasks.rl, policy.tokenizer, s.scorer, s.config.rollout, s.config.seed, s.ranks, s.config.algo, learner.greedy,
        s.revive_engine,
    )  # fmt: skip
    if s.resumed and start:
        s.resumed.restore_optimizer(optimizer)
        learner.restore(s.resumed.state["learner"])
        collector.restore(s.resumed.state["collector"])

    for step in range(start + 1, config.steps + 1):
        phases, restarts = Phases(policy.device), s.engine_restarts
        with phases("handover"):
            learner.park()
            s.hand_over(optimizer, verify=s.config.handover.verify or step == start + 1)
        if config.eval_every and step > 1 and (step - 1) % config.eval_every == 0:
            with phases("evaluate"):
                evaluate(s, "step", step - 1)
        with phases("rollout"), s.console.progress(f"step {step}: sampling", s.config.rollout.batch_size) as advance:
            before = replace(engine.stats)
            batch = collector.collect(advance)
        with phases("sleep"):
            take_back(policy, engine, optimizer)
        with phases("update"):
            trained, advantages = learner.learn(batch, step)
            s.version += 1
        s.save_rollouts(f"step_{step:04d}", batch.all_groups, advantages, {group.id for group in batch.groups})
        values = {"step": step, "version": s.version, **rollout_metrics(batch), **trained, **phase_metrics(phases, batch, s.ranks)}
        values |= {**prompt_metrics(before, engine.stats, s.ranks), "engine_restarts": s.engine_restarts - restarts}
        s.metrics.write("rl", **values)  # before the checkpoint, which counts its lines: a killed run loses and doubles none
        if step % config.checkpoint_every == 0 or step == config.steps:
            s.save_checkpoint("rl", step, optimizer, learner.critic, collector=collector.state(), learner=learner.state())
        s.console.say(step_line(values, config.steps))


def rollout_metrics(batch: Batch) -> dict[str, Any]:
    """Over all rollouts that were sampled, the silent groups included: training data alone would flatter or shame the policy."""
    rollouts = [r for group in batch.all_groups for r in group.rollouts]
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [r.reward for r in scored if r.reward is not None]
    parts = sorted({name for r in scored for name in r.reward_parts})
    return {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "parts": {name: statistics.fmean(r.reward_parts.get(name, 0.0) for r in scored) for name in parts},
        "length": statistics.fmean(r.sampled for r in rollouts),
        "truncated": statistics.fmean(r.finish_reason == "length" for r in rollouts),
        "rollouts": len(batch.rollouts),
        "silent_groups": batch.silent_groups,
        "missing_groups": batch.missing_groups,
        "replacement_rounds": batch.replacement_rounds,
        "reward_errors": batch.reward_errors,
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
