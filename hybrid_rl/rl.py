"""The loop: hand the weights over, sample, give the KV cache back, train. Read it top to bottom; this is the system."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from hybrid_rl.console import step_line
from hybrid_rl.evaluate import evaluate
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.memory import Phases
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.update import Loss, score, update
from hybrid_rl.ranks import Ranks
from hybrid_rl.reference import Reference, make_reference
from hybrid_rl.rollout.collector import Batch, Collector
from hybrid_rl.session import Session, make_optimizer


def train_rl(s: Session) -> None:
    """rl.steps steps of synchronous GRPO. Goes on from a checkpoint of this stage where the session has one.

    Every rank runs this: it samples its share, and trains its share, of what all of them know.
    """
    config, policy, engine = s.config.rl, s.policy, s.engine
    advantage_fn = instantiate(s.config.algo.advantage, _partial_=True)
    loss_fn = instantiate(s.config.algo.loss, _partial_=True)
    optimizer = make_optimizer(policy, config.optimizer, config.steps * s.config.algo.minibatches)
    collector = Collector(engine, s.tasks.rl, policy.tokenizer, s.scorer, s.config.rollout, s.config.seed, s.ranks)
    start = s.resumed_step("rl")
    if s.resumed and start:
        s.resumed.restore_optimizer(optimizer)
        collector.restore(s.resumed.state["collector"])
    reference = make_reference(s, start)

    for step in range(start + 1, config.steps + 1):
        phases = Phases(policy.device)
        with phases("handover"):
            verify = s.config.handover.verify or step == start + 1
            hand_over(policy, engine, s.version, optimizer, verify=verify, bucket_bytes=s.config.handover.bucket_mib * 2**20)
        if config.eval_every and step > 1 and (step - 1) % config.eval_every == 0:
            with phases("evaluate"):
                evaluate(s, "step", step - 1)
        with phases("rollout"), s.console.progress(f"step {step}: sampling", s.config.rollout.batch_size) as advance:
            batch = collector.collect(advance)
        with phases("sleep"):
            take_back(policy, engine, optimizer)
        with phases("update"):
            advantages = {(g.id, i): a for g in batch.groups for i, a in enumerate(advantage_fn(torch.tensor(g.rewards)).tolist())}
            trained = train_on(s, optimizer, batch, advantages, loss_fn, reference)
            s.version += 1
        s.save_rollouts(f"step_{step:04d}", batch.all_groups, advantages, {group.id for group in batch.groups})
        values = {"step": step, "version": s.version, **rollout_metrics(batch), **trained, **phase_metrics(phases, batch, s.ranks)}
        s.metrics.write("rl", **values)  # before the checkpoint, which counts its lines: a killed run loses and doubles none
        if step % config.checkpoint_every == 0 or step == config.steps:
            s.save_checkpoint("rl", step, optimizer, collector=collector.state())
        s.console.say(step_line(values, config.steps))


def train_on(
    s: Session, optimizer: Optimizer, batch: Batch, advantages: dict[tuple[int, int], float], loss_fn: Loss, reference: Reference | None,
) -> dict[str, float]:  # fmt: skip
    """One AdamW step for each minibatch of whole groups; nothing where every group was silent and no gradient is to be had.

    Statistics are means over the minibatches. Only the mismatch is of the first one: before the first step trainer and
    engine have the same weights, after it the difference is learning.
    """
    c = s.config
    share = max(1, -(-len(batch.groups) // c.algo.minibatches))
    minibatches = [[r for g in batch.groups[i : i + share] for r in g.rollouts] for i in range(0, len(batch.groups), share)]
    how = (c.rollout.temperature, s.layout, c.policy.row_tokens)
    reference_logprobs: list[Tensor | None] = [None] * len(minibatches)
    if reference:
        with reference.awake() as model:
            reference_logprobs = [score(model, rollouts, *how) for rollouts in minibatches]
    results = []
    for rollouts, distant in zip(minibatches, reference_logprobs, strict=True):
        own = [advantages[r.group_id, r.index] for r in rollouts]
        results.append(update(s.policy, optimizer, rollouts, own, loss_fn, *how, distant, c.algo.kl_coef))
    if not results:
        names = ("loss", "entropy", "mismatch_kl", "clip_fraction", *(["reference_kl"] if reference else []), "grad_norm", "lr", "skipped")
        return dict.fromkeys(names, 0.0)
    means = {name: statistics.fmean(result[name] for result in results) for name in results[0]}
    return {**means, "mismatch_kl": results[0]["mismatch_kl"], "skipped": sum(result["skipped"] for result in results)}


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
