"""Run the command: compose and check the settings, start the ranks if there are several, run the stages.

- train: python -m hybrid_rl.run +recipe=reverse
- check everything, print the plan: python -m hybrid_rl.run +recipe=reverse dry_run=true
- on two ranks: python -m hybrid_rl.run +recipe=reverse ranks=2
- on ranks of another launcher: torchrun --nproc-per-node 2 -m hybrid_rl.run +recipe=reverse
- sweep: python -m hybrid_rl.run +recipe=reverse -m seed=0,1,2
- go on with a run, its settings from its folder: python -m hybrid_rl.run resume=outputs/reverse/<run> rl.steps=40
- evaluate a model, and do nothing else: python -m hybrid_rl.evaluate +recipe=reverse model.path=<folder>
- the resolved configuration: python -m hybrid_rl.run +recipe=reverse --cfg job
- a recipe of your own, my_conf/recipe/mine.yaml: python -m hybrid_rl.run --config-dir my_conf +recipe=mine
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, cast

import hydra
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight.hydra_private import parse_arguments, run_job, run_sweep, sweep_jobs
from hybrid_rl.preflight.names import parse, split
from hybrid_rl.preflight.settings import CONF, RESUME, hydra_folders, load, search
from hybrid_rl.processes import hangs
from hybrid_rl.processes.launch import (
    MARGIN,
    after_rank_0,
    attend,
    end_with_launcher,
    environment_problem,
    launch,
    launched,
    world,
)
from hybrid_rl.processes.signals import asked, end_now, listening, pass_to_busy_children
from hybrid_rl.run_folder.files import check_writable

if TYPE_CHECKING:
    from hybrid_rl.processes.ranks import Ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, by default the command line's. Return the exit code. May be called again."""
    try:
        code = _main(sys.argv[1:] if arguments is None else list(arguments))
    except ConfigError as error:
        after_rank_0()
        print(f"hybrid_rl: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    return _ranks.leave(code) if _ranks else code


_ranks: Ranks | None = None  # if a launcher, or this program itself, started several


def _main(arguments: list[str]) -> int:
    """Check every job's settings before anything heavy loads, then let Hydra run them."""
    global _ranks
    if problem := environment_problem():
        raise ConfigError(problem)
    if launched():
        end_with_launcher()
        hangs.begin()
    given = parse_arguments(arguments)
    if given.help or given.hydra_help or given.info or given.cfg or given.shell_completion:
        sys.argv[1:] = arguments
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda _: None)()
        return 0
    for name, value in (
        ("config-name", given.config_name),
        ("config-path", given.config_path),
        ("experimental-rerun", given.experimental_rerun),
    ):
        if value:
            raise ConfigError(
                f"--{name}={value}: is not supported; put your own settings into a recipe: "
                "--config-dir FOLDER +recipe=NAME"
            )
    if given.multirun and launched():
        raise ConfigError(
            "-m: a sweep starts the ranks of its jobs itself; run it without another launcher, with ranks=N"
        )
    own = Path(given.config_dir) if given.config_dir else None
    jobs = sweep_jobs(parse(given.overrides)) if given.multirun else [given.overrides]
    configs = [cast(Config, OmegaConf.to_object(load(overrides, own))) for overrides in jobs]
    for config in configs:
        _check_ranks(config)
        if given.multirun and config.resume not in RESUME:
            raise ConfigError(f"resume={config.resume}: a sweep starts its own runs; go on with one of them without -m")
    task, of_hydra = split(jobs[0])
    run_dir, sweep_dir = hydra_folders(of_hydra if configs[0].resume not in RESUME else jobs[0], own)
    if given.multirun:
        return _sweep(given.overrides, own, configs, Path(sweep_dir))
    if launched():
        from hybrid_rl.processes.ranks import join

        _ranks = join(configs[0].rank_timeout, configs[0].device)
    choose = partial(_choose_folder, configs[0], run_dir)
    folder = (_ranks.from_main(choose) if _ranks else choose()).absolute()
    arguments = ["-m", "hybrid_rl.run", *_config_dir(own), *task, _run_dir(folder)]
    if configs[0].resume not in RESUME:
        task = []  # Hydra knows neither the recipe nor the settings of a run's folder, and `_job` needs none from it
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="run"):
        settings = [*search(own), *task, *of_hydra, _run_dir(folder)]
        return run_job(lambda _: _job(configs[0], folder, arguments), settings)


def _job(config: Config, folder: Path, arguments: list[str]) -> int:
    """Run the stages in this process, or on ranks started with `arguments`. Return the exit code."""
    ranks = world() or config.ranks or _gpus(config) or 1  # torch loads here, after every setting was checked
    if ranks > 1 and not _ranks:
        return launch(ranks, arguments, folder, config.rank_timeout, config.stop_timeout)
    from hybrid_rl.processes.ranks import Ranks
    from hybrid_rl.stages import run

    here = _ranks or Ranks()
    if here.world == 1 and not config.dry_run:
        hangs.alone(config.rank_timeout, folder / "stacks", lambda: end_now(1))
    with listening(config.stop_timeout, speaks=here.main), here.failing():
        return run(config, folder, here)


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def _sweep(overrides: list[str], own: Path | None, configs: Sequence[Config], folder: Path) -> int:
    """Run every job of a sweep in its own process. Return 1 if one failed, 128 + n if signal n ended the sweep."""
    if not all(config.dry_run for config in configs):
        _check_writable(folder, f"hydra.sweep.dir={folder}")
    patience = MARGIN + max(config.stop_timeout for config in configs)
    with (
        listening(patience, speaks=False, pass_on=pass_to_busy_children),
        initialize_config_dir(str(CONF), version_base="1.3", job_name="run"),
    ):
        codes = run_sweep(partial(_sweep_job, own), [*search(own), *overrides])
    return next((code for code in codes if code > 128), int(any(codes)))


def _sweep_job(own: Path | None, config: DictConfig) -> int:
    """Run one job of a sweep in a new process, so that it does not inherit another job's memory or threads."""
    if asked():  # a signal ends the whole sweep, a failure only its job
        return 128 + asked()
    job = HydraConfig.get()
    task = list(job.overrides.task)
    print(f"\nsweep job {job.job.num}: {' '.join(task)}", flush=True)
    return attend(
        [{}],
        ["-m", "hybrid_rl.run", *_config_dir(own), *task, _run_dir(Path(job.runtime.output_dir))],
        config.stop_timeout,
    )


def _config_dir(own: Path | None) -> list[str]:
    return [f"--config-dir={own}"] if own else []


def _run_dir(folder: Path) -> str:
    """Return the override that sets the run's folder, quoted because commas, brackets and = have a meaning to Hydra."""
    quoted = str(folder).replace("'", "\\'")
    return f"hydra.run.dir='{quoted}'"


# ---- where a run is written -----------------------------------------------------------------------------------------


def _choose_folder(config: Config, given: str) -> Path:
    """Return the run's folder: that of `resume` or hydra.run.dir (`given`), the newest unfinished one, or a new one.

    A new one is named by the time. Raises ConfigError if `resume` asks for one that does not exist, or the folder
    cannot be written to. A dry run needs no folder.
    """
    if config.dry_run:
        return Path()
    if config.resume not in RESUME:
        if given and Path(given).resolve() != Path(config.resume).resolve():
            raise ConfigError(
                f"hydra.run.dir={given}: resume={config.resume} names another folder; leave one of them out"
            )
        return _check_writable(Path(config.resume), f"resume={config.resume}")
    if given:
        if config.resume == "must" and not _begun(Path(given)):
            raise ConfigError(f"resume=must: there is no run in {given} to go on with")
        return _check_writable(Path(given), f"hydra.run.dir={given}")
    runs = Path(config.output_dir) / config.name
    try:
        there = runs.is_dir()
    except OSError as error:  # a name that is too long
        raise ConfigError(
            f"output_dir={config.output_dir}: cannot be written to: {error.strerror}; choose another folder"
        ) from error
    newest = max((folder for folder in runs.glob("*") if _begun(folder)), default=None) if there else None
    finished = newest is not None and (newest / "summary.json").exists()
    if config.resume == "must" and newest is None:
        raise ConfigError(f"resume=must: there is no run in {runs} to go on with")
    if config.resume == "must" and finished:
        raise ConfigError(
            f"resume=must: the newest run, {newest}, reached its end; resume={newest} with more rl.steps trains it "
            "further"
        )
    if config.resume != "never" and newest and not finished:
        return _check_writable(newest, f"resume={config.resume}: {newest}")
    started = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    numbered = (runs / f"{started}_{n}" for n in count(2))  # two runs may start in one second
    return _check_writable(
        next(folder for folder in chain([runs / started], numbered) if not folder.exists()),
        f"output_dir={config.output_dir}",
    )


def _begun(folder: Path) -> bool:
    """Return whether a run has begun there: its settings exist, or at least a complete checkpoint."""
    return (folder / "config.yaml").exists() or any(folder.glob("checkpoints/[!.]*/COMPLETE"))


def _check_writable(folder: Path, setting: str) -> Path:
    """Return the folder. Raise ConfigError, which names `setting`, if it cannot be made or written to."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(f"{setting}: {there} is a file; choose another folder")
        check_writable(folder if folder.exists() else folder.parent)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot be written to: {error.strerror}; choose another folder") from error
    return folder


def _check_ranks(config: Config) -> None:
    """Raise ConfigError if `ranks` contradicts the launcher, or if this machine has too few GPUs for its ranks."""
    if world() and config.ranks not in (0, world()):
        raise ConfigError(f"ranks={config.ranks}: the launcher started {world()}; leave ranks out")
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else config.ranks
    if ranks > 1 and config.device != "cpu":
        gpus = _gpus(config)
        if ranks > gpus and (gpus or config.device == "cuda"):
            raise ConfigError(
                f"ranks={ranks}: torch sees {gpus} GPU(s) and each rank needs one; fewer ranks, or device=cpu"
            )


def _gpus(config: Config) -> int:
    """Return the number of GPUs of this machine that ranks may use."""
    import torch

    return 0 if config.device == "cpu" else torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
