"""Evaluate on every held-out task once (or eval.samples times), with the engine, phases and scoring of training.

To evaluate a model and do nothing else:

    python -m hybrid_rl.evaluate +recipe=mine model.path=outputs/mine/<run>/final
    python -m hybrid_rl.evaluate +recipe=mine model.path=<run>/final eval.against=<run>/base_model    # two models
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

from hybrid_rl.config import Config
from hybrid_rl.engine.base import Sampling
from hybrid_rl.report import versus
from hybrid_rl.report.console import Console, eval_line, source_lines
from hybrid_rl.report.scores import scores
from hybrid_rl.report.step_metrics import turn_metrics
from hybrid_rl.rollout.generate import fault_metrics, first_faults, reward_faults
from hybrid_rl.run_folder.files import write_json
from hybrid_rl.session import Session
from hybrid_rl.types import Group

AGAINST = "against"  # the folder, inside the run's, of the second model's evaluation


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
        "truncated": statistics.fmean(r.truncated for r in rollouts),
        **turn_metrics(rollouts),
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


def models_of(config: Config, folder: Path) -> list[tuple[Config, Path]]:
    """Return the settings and the folder of a run, and those for the model of eval.against, if there is one."""
    if config.eval.against is None:
        return [(config, folder)]
    second = replace(config, model=replace(config.model, path=config.eval.against), resume="never")
    return [(config, folder), (second, folder / AGAINST)]


def compare_models(config: Config, folder: Path, console: Console) -> None:
    """Compare the two evaluations of eval.against, on the console and in a file. Rank 0 alone."""
    found = versus.versus(folder, folder / AGAINST, config.eval.pass_reward)
    write_json(folder / versus.FILE, found)
    console.heading(f"{config.model.path} minus {config.eval.against}, task by task, with 95% intervals")
    if found["left_out"]:
        console.say(f"note:    {found['left_out']} tasks are left out, which only one of them was evaluated on")
    for line in versus.lines(found):
        console.say(f"  {line}")
    console.say(f"written: {folder / versus.FILE}")


if __name__ == "__main__":
    from hybrid_rl.run import main

    sys.exit(main([*sys.argv[1:], "sft.steps=0", "rl.steps=0"]))
