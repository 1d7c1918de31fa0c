"""Sweeps: python -m hybrid_rl.run … -m runs each job in a process of its own, by whichever launcher Hydra has.

A job that fails is reported, and the others go on. Sweepers that search get the reward of a job's last evaluation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
    if asked():  # a signal is meant for the whole sweep, a failure only for its job
        return 128 + asked()
    job = HydraConfig.get()
    task, folder = list(job.overrides.task), Path(job.runtime.output_dir)
    what = f"sweep job {job.job.num}"
    print(f"\n{what}: {' '.join(task)}", flush=True)
    arguments = ["-m", "hybrid_rl.run", *config_dir(own), *task, run_dir(folder)]
    code = attend([{}], arguments, config.stop_timeout)
    if code and code <= 128:
        print(f"{what} failed with exit code {code}: {' '.join(task)}", flush=True)
    if job.runtime.choices[SWEEPER] == "basic":
        return code
    return None if code else _objective(folder)


def _objective(folder: Path) -> float | None:
    summary = read_json(folder / "summary.json")
    return next((float(summary[name]) for name in OBJECTIVE if summary.get(name) is not None), None)


def _report(folder: Path) -> bool:
    """Say how many jobs reached their end and which did not; return whether all did."""
    every = sorted((f for f in folder.glob("[!.]*/") if f.is_dir()), key=lambda f: (len(f.name), f.name))
    left = [f.name for f in every if not (f / "summary.json").exists()]
    print(
        f"\nsweep:   {len(every) - len(left)} of {len(every)} jobs reached their end"
        + (f", not {', '.join(left)}" if left else "")
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
