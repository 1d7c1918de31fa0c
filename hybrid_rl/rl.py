"""The loop: hand the weights over, sample, give the KV cache back, train. Read it top to bottom; this is the system."""

from __future__ import annotations

from hybrid_rl.console import step_line
from hybrid_rl.evaluate import evaluate
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.learner import Learner
from hybrid_rl.memory import Phases
from hybrid_rl.monitor import Alarms, phase_metrics, rollout_metrics
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.session import Session


def train_rl(s: Session) -> None:
    """rl.steps steps of synchronous GRPO. Goes on from a checkpoint of this stage where the session has one.

    Every rank runs this: it samples its share, and trains its share, of what all of them know.
    """
    config, policy, engine = s.config.rl, s.policy, s.engine
    start = s.resumed_step("rl")
    learner, alarms = Learner(s, start), Alarms()
    optimizer = learner.optimizer
    collector = Collector(
        engine, s.tasks.rl, policy.tokenizer, s.scorer, s.config.rollout, s.config.seed, s.ranks, s.config.algo, learner.greedy
    )
    if s.resumed and start:
        s.resumed.restore_optimizer(optimizer)
        learner.restore(s.resumed.state["learner"])
        collector.restore(s.resumed.state["collector"])
        alarms.restore(s.resumed.state["alarms"])

    for step in range(start + 1, config.steps + 1):
        s.seed_step("rl", step)
        phases = Phases(policy.device)
        with phases("handover"):
            learner.park()
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
            trained, advantages = learner.learn(batch, step)
            s.version += 1
        s.save_rollouts(f"step_{step:04d}", batch.all_groups, advantages, {group.id for group in batch.groups})
        values = {"step": step, "version": s.version, **rollout_metrics(batch), **trained, **phase_metrics(phases, batch, s.ranks)}
        begun = alarms.check(values)
        # before the checkpoint, which counts its lines: a killed run loses and doubles none
        s.metrics.write("rl", **values, alarms=list(begun))
        s.publish_checkpoint(wait=False)  # of a step before, if it is written by now
        stopping = s.stop_asked()
        due = step % config.checkpoint_every == 0 or (config.keep_best and step % config.eval_every == 0)
        if due or step == config.steps or stopping:
            states = {"collector": collector.state(), "learner": learner.state(), "alarms": alarms.state()}
            s.save_checkpoint("rl", step, optimizer, learner.critic, **states)
        s.console.say(step_line(values, config.steps))
        for line in begun.values():
            s.console.say(f"  ! {line}")
        if stopping:
            s.stop(stopping, f"step {step} of {config.steps} of RL is done and saved")
    s.publish_checkpoint()
