"""Sweeps: python -m hybrid_rl.run … -m runs each job in a process of its own, by whichever launcher Hydra has.

A job that fails is reported, and the others go on. Sweepers that search get the reward of a job's last evaluation.
With sweep.prune a job that falls behind the others is ended; what it has reached counts.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight.hydra_private import first_job, run_sweep, sweep_jobs
from hybrid_rl.preflight.names import composition_problem, first_line, parse
from hybrid_rl.preflight.settings import CONF, check_folder, config_dir, run_dir, search
from hybrid_rl.processes.launch import MARGIN, attend
from hybrid_rl.processes.signals import asked, listening, pass_to_busy_children
from hybrid_rl.run_folder.files import Unreadable, read_json, read_yaml

SWEEPER = "hydra/sweeper"
PRUNED = "pruned.txt"  # says in the folder of a job why it was ended
OBJECTIVE = ("eval/rl", "eval/model")  # of summary.json: what a sweeper that searches gets


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every job; of a sweeper that searches, those of one that it may begin with."""
    parsed = parse(overrides)
    try:
        return sweep_jobs(parsed) if _sweeper(overrides) == "basic" else [first_job(parsed)]
    except HydraException as error:
        raise ConfigError(f"{first_line(error)}; intervals are for {SWEEPER}=optuna") from error


def run(overrides: Sequence[str], own: Path | None, configs: Sequence[Config], folder: Path) -> int:
    """Run the jobs; return 0 if all reached their end, 128 + n if signal n ended the sweep, else 1."""
    dry = all(config.dry_run for config in configs)
    if not dry:
        check_folder(folder, f"hydra.sweep.dir={folder}")
    # the default is named by the time, which goes on
    settings = [*search(own), *overrides, run_dir(folder, "hydra.sweep.dir")]
    if _sweeper(overrides) == "optuna" and not any(o.startswith("hydra.sweeper.direction=") for o in overrides):
        settings.append("hydra.sweeper.direction=maximize")
    codes: list[int] = []
    with (
        listening(MARGIN + max(c.stop_timeout for c in configs), speaks=False, pass_on=pass_to_busy_children),
        initialize_config_dir(str(CONF), version_base="1.3", job_name="run"),
    ):
        try:
            codes = [code for code in run_sweep(partial(_job, own), settings) if isinstance(code, int)]
        except HydraException as error:
            raise ConfigError(composition_problem(error, parse(overrides))) from error
        except Exception as error:  # a launcher whose process died, a sweeper without one finished job
            print(f"hybrid_rl: the sweep broke off: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
            codes = [1]
        if stopped := asked():
            codes.append(128 + stopped)
    if dry:
        return int(any(codes))
    complete = _report(folder)
    return next((code for code in codes if code > 128), int(any(codes) or not complete))


def _sweeper(overrides: Sequence[str]) -> str:
    return next((o.partition("=")[2] for o in reversed(overrides) if o.startswith(f"{SWEEPER}=")), "basic")


def _job(own: Path | None, config: DictConfig) -> int | float | None:
    """Run one job, in whatever process Hydra's launcher calls this: no job inherits another's memory or threads.

    Returns its exit code; to a sweeper that searches the reward of its last evaluation, None if it failed.
    """
    job = HydraConfig.get()
    searches = job.runtime.choices[SWEEPER] != "basic"
    if asked():  # a signal is meant for the whole sweep, a failure only for its job
        return None if searches else 128 + asked()
    task, folder = list(job.overrides.task), Path(job.runtime.output_dir)
    what = f"sweep job {job.job.num}"
    print(f"\n{what}: {' '.join(task)}", flush=True)
    arguments = ["-m", "hybrid_rl.run", *config_dir(own), *task, run_dir(folder)]
    pruner = Pruner(folder, config.sweep.prune_after) if config.sweep.prune else None
    code = attend([{}], arguments, config.stop_timeout, pruner)
    if pruner and pruner.behind and code == 128 + signal.SIGTERM and not asked():
        print(f"{what} is pruned: {pruner.behind}; resume={folder} goes on with it", flush=True)
        (folder / PRUNED).write_text(f"{pruner.behind}\n")
        code = 0
    if code and code <= 128:
        print(f"{what} failed with exit code {code}: {' '.join(task)}", flush=True)
    if not searches:
        return code
    return None if code else _objective(folder)


def _objective(folder: Path) -> float | None:
    if (folder / PRUNED).exists():
        return max(evaluations(folder).items(), default=(0, None))[1]  # of the latest step
    summary = read_json(folder / "summary.json")
    return next((float(summary[name]) for name in OBJECTIVE if summary.get(name) is not None), None)


class Pruner:
    """Ends a job that falls behind the others of its sweep, by the median rule of Google Vizier (Golovin et al. 2017).

    It reads the metrics.jsonl of all jobs in the sweep's folder, so it works with every launcher and sweeper.
    """

    def __init__(self, folder: Path, after: int):
        self.folder, self.after, self.behind = folder, after, ""
        self._seen, self._next = -1, 0.0

    def check(self, pids: Mapping[int, int], ended: Sequence[int]) -> None:
        """At most once a second, compare a new evaluation; send SIGTERM, which saves the job, if it is behind."""
        if self.behind or not pids or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1
        own = evaluations(self.folder)
        if not own or max(own) == self._seen:
            return
        self._seen = step = max(own)
        others = [found[step] for job in self.folder.parent.glob("[!.]*/") if step in (found := evaluations(job))]
        others.remove(own[step])
        if len(others) >= self.after and (best := max(own.values())) < (median := statistics.median(others)):
            self.behind = (
                f"its best evaluation, {best:.3f} up to step {step}, is below the others' median, {median:.3f}"
            )
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


def evaluations(folder: Path) -> dict[int, float]:
    """Return the rewards of a job's evaluations between steps, by step. Unfinished lines are left out."""
    try:
        lines = (folder / "metrics.jsonl").read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        if '"name": "step"' in line:
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                found[int(record["step"])] = float(record["reward"])
    return found


def _report(folder: Path) -> bool:
    """Say how many jobs reached their end and which did not; return whether all did."""
    every = sorted((f for f in folder.glob("[!.]*/") if f.is_dir()), key=lambda f: (len(f.name), f.name))
    pruned = [f.name for f in every if (f / PRUNED).exists()]
    left = [f.name for f in every if not (f / "summary.json").exists() and f.name not in pruned]
    print(
        f"\nsweep:   {len(every) - len(left) - len(pruned)} of {len(every)} jobs reached their end"
        + (f", not {', '.join(left)}" if left else "")
        + (f"; {', '.join(pruned)} were pruned" if pruned else "")
    )
    if (folder / ".submitit").is_dir():
        print(f"output:  {folder / '.submitit'}, a folder a job")
    try:
        best = read_yaml(folder / "optimization_results.yaml")
        print(f"best:    {best['best_params']}, reward {best['best_value']:.3f}")
    except (Unreadable, KeyError, TypeError, ValueError):  # not a sweeper's that searches for one best value
        pass
    print(f"compare: python -m hybrid_rl.compare {folder}", flush=True)
    return not left
