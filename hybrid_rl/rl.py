"""The loop: hand the weights over, sample, give the KV cache back, train. Read it top to bottom; this is the system."""

from __future__ import annotations

from dataclasses import replace

from hybrid_rl.evaluate import evaluate
from hybrid_rl.handover import take_back
from hybrid_rl.learner import Learner
from hybrid_rl.report.alarms import Alarms
from hybrid_rl.report.console import NOTHING, step_line
from hybrid_rl.report.phases import Phases
from hybrid_rl.report.step_metrics import phase_metrics, prompt_metrics, rollout_metrics
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.session import Session


class NothingTrained(RuntimeError):
    """RL steps had no gradient for too long."""


def train_rl(s: Session) -> None:
    """rl.steps steps of synchronous GRPO. Goes on from a checkpoint of this stage where the session has one.

    Every rank runs this: it samples its share, and trains its share, of what all of them know. Raises NothingTrained, with a checkpoint
    saved, after rl.max_empty_steps steps in a row without an update.
    """
    config, policy, engine = s.config.rl, s.policy, s.engine
    start = s.resumed_step("rl")
    learner, alarms = Learner(s, start), Alarms()
    optimizer = learner.optimizer
    collector = Collector(
        engine, s.tasks.rl, policy.tokenizer, s.scorer, s.config.rollout, s.config.seed, s.ranks, s.config.algo, learner.greedy,
        s.revive_engine, s.data_seed,
    )  # fmt: skip
    if s.resumed and start:
        s.resumed.restore_optimizer(optimizer)
        for name, part in (("learner", learner), ("collector", collector), ("alarms", alarms)):
            s.resumed.restore(name, part.restore)

    for step in range(start + 1, config.steps + 1):
        s.seed_step("rl", step)
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
            s.count_step(trained["nothing_trained"])
        s.save_rollouts(f"step_{step:04d}", batch.all_groups, advantages, batch.trained)
        s.remove_old_rollouts(step)
        values = {
            "step": step,
            "version": s.version,
            **rollout_metrics(batch),
            **trained,
            **phase_metrics(phases, batch, s.ranks),
        }
        values |= {**prompt_metrics(before, engine.stats, s.ranks), "engine_restarts": s.engine_restarts - restarts}
        begun = alarms.check(values)
        # before the checkpoint, which counts its lines: a killed run loses and doubles none
        s.metrics.write("rl", **values, alarms=list(begun))
        s.publish_checkpoint(wait=False)  # of a step before, if it is written by now
        stopping = s.stop_asked()
        idle = 0 < config.max_empty_steps <= s.empty_steps
        due = step % config.checkpoint_every == 0 or (config.keep_best and step % config.eval_every == 0)
        if due or step == config.steps or stopping or idle:
            states = {"collector": collector.state(), "learner": learner.state(), "alarms": alarms.state()}
            s.save_checkpoint("rl", step, optimizer, learner.critic, **states)
        s.console.reward_faults(batch.examples)
        s.console.say(step_line(values, config.steps))
        for line in begun.values():
            s.console.say(f"  ! {line}")
        if idle:
            s.publish_checkpoint()
            why, remedy = NOTHING[trained["nothing_trained"]]
            raise NothingTrained(
                f"nothing was trained in {s.empty_steps} RL steps in a row (rl.max_empty_steps={config.max_empty_steps}), "
                f"in step {step} because {why}: {remedy}"
            )
        if stopping:
            s.stop(stopping, f"step {step} of {config.steps} of RL is done and saved")
    learner.park()
    s.publish_checkpoint()
