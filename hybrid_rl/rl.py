"""The loop of RL: hand the weights over, sample, release the KV cache, train. Read it from top to bottom."""

from __future__ import annotations

from dataclasses import replace

from hybrid_rl.engine.base import request_seed
from hybrid_rl.evaluate import evaluate
from hybrid_rl.learner import make_learner
from hybrid_rl.processes.deterministic import seed_all
from hybrid_rl.report.alarms import Alarms
from hybrid_rl.report.console import NOTHING
from hybrid_rl.report.phases import Phases
from hybrid_rl.report.step_metrics import phase_metrics, prompt_metrics, rollout_metrics
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.session import Session


class NothingTrained(RuntimeError):
    """Raised when too many RL steps in a row had no gradient."""


def train_rl(s: Session) -> None:
    """Take rl.steps synchronous RL steps; a run that was resumed in this stage goes on from its checkpoint.

    Every rank runs this: all know the whole batch, and each samples and trains its share. Raises NothingTrained, with a
    checkpoint saved, after rl.max_empty_steps steps in a row without an update.
    """
    config, policy, handover, progress = s.config.rl, s.policy, s.handover, s.progress
    start = s.resumed_step("rl")
    learner, alarms = make_learner(s, start), Alarms()
    optimizer, collector = learner.optimizer, Collector(s.generator, s.tasks.rl, s.config, s.data_seed)
    if s.resumed and start:
        s.resumed.restore_optimizer(optimizer)
        for name, part in (("learner", learner), ("collector", collector), ("alarms", alarms)):
            s.resumed.restore(name, part.restore)

    for step in range(start + 1, config.steps + 1):
        seed_all(request_seed(s.config.seed, "rl", step))
        phases, restarts = Phases(policy.device), handover.restarts
        with phases("handover"):
            learner.park()
            handover.to_engine(progress.version, optimizer, verify=s.config.handover.verify or step == start + 1)
        if config.eval_every and step > 1 and (step - 1) % config.eval_every == 0:
            with phases("evaluate"):
                evaluate(s, "step", step - 1)
        with phases("rollout"), s.console.progress(f"step {step}: sampling", s.config.rollout.batch_size) as advance:
            before = replace(handover.engine.stats)
            batch = collector.collect(step, advance)
        with phases("sleep"):
            handover.to_trainer(optimizer)
        with phases("update"):
            trained, advantages = learner.learn(batch, step)
            progress.version += 1
            progress.count_step(trained["nothing_trained"])

        s.rollouts.save(f"step_{step:04d}", batch.all_groups, advantages, batch.trained, batch.tokens, wait=False)
        s.rollouts.remove_old(step)
        values = {
            "step": step,
            "version": progress.version,
            **rollout_metrics(batch),
            **trained,
            **phase_metrics(phases, batch, policy.ranks),
            **prompt_metrics(before, handover.engine.stats, policy.ranks),
            "engine_restarts": handover.restarts - restarts,
        }
        begun = alarms.check(values)
        # before the checkpoint, which stores the number of lines: a resumed run then loses and repeats none
        s.metrics.write("rl", **values, alarms=list(begun))
        s.saver.publish(wait=False)  # an earlier step's checkpoint, if it is written by now
        stopping = s.stop_asked()
        idle = 0 < config.max_empty_steps <= progress.empty_steps
        due = step % config.checkpoint_every == 0 or (config.keep_best and step % config.eval_every == 0)
        if due or step == config.steps or stopping or idle:
            states = {"collector": collector.state(), "learner": learner.state(), "alarms": alarms.state()}
            s.saver.save("rl", step, optimizer, learner.critic, **states)
        s.console.reward_faults(batch.examples)
        s.console.step(values, config.steps)
        for line in begun.values():
            s.console.say(f"  ! {line}")
        if idle:
            s.saver.publish()
            raise NothingTrained(_idle(s, step, trained["nothing_trained"]))
        if stopping:
            s.stop(stopping, f"step {step} of {config.steps} of RL is done and saved")
    learner.park()
    s.saver.publish()


def _idle(s: Session, step: int, nothing: str) -> str:
    why, remedy = NOTHING[nothing]
    return (
        f"nothing was trained in {s.progress.empty_steps} RL steps in a row "
        f"(rl.max_empty_steps={s.config.rl.max_empty_steps}), in step {step} because {why}: {remedy}"
    )
