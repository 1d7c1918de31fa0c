"""Entry: compose → validate → start the ranks, where there are several → stages (evaluate, sft, rl, evaluate) → report.

- train: python -m hybrid_rl.run +recipe=reverse
- check everything, print the plan: python -m hybrid_rl.run +recipe=reverse dry_run=true
- on two ranks: python -m hybrid_rl.run +recipe=reverse ranks=2
- on ranks of another launcher: torchrun --nproc-per-node 2 -m hybrid_rl.run +recipe=reverse
- sweep: python -m hybrid_rl.run +recipe=reverse -m seed=0,1,2
- the resolved configuration: python -m hybrid_rl.run +recipe=reverse --cfg job
- a recipe of your own, my_conf/recipe/mine.yaml: python -m hybrid_rl.run --config-dir my_conf +recipe=mine
"""

from __future__ import annotations

import os
import sys
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight.settings import CONF, load, parse
from hybrid_rl.processes import hangs
from hybrid_rl.processes.launch import after_rank_0, attend, end_with_launcher, environment_problem, launch, launched, world
from hybrid_rl.processes.signals import end_now, listening
from hybrid_rl.run_folder.files import check_writable

if TYPE_CHECKING:
    from hybrid_rl.processes.ranks import Ranks


def main() -> int:
    try:
        code = _main()
    except KeyboardInterrupt:
        code = 130
    return _ranks.leave(code) if _ranks else code


def _main() -> int:
    """Check every job's settings before anything heavy loads, then let Hydra run them."""
    global _ranks
    if problem := environment_problem():
        print(f"hybrid_rl: {problem}", file=sys.stderr)
        return 2
    if launched():
        end_with_launcher()
        hangs.begin()
    arguments = get_args_parser().parse_intermixed_args()
    sys.argv[1:] = [a for a in sys.argv[1:] if a not in arguments.overrides] + arguments.overrides  # -m may stand anywhere
    only_shows = arguments.help or arguments.hydra_help or arguments.info or arguments.cfg
    try:
        if arguments.multirun and launched():
            raise ConfigError("-m: a sweep starts the ranks of its jobs itself; run it without another launcher, with ranks=N")
        jobs = [] if only_shows else _jobs(arguments.overrides, arguments.multirun)
        configs = [load([o for o in overrides if not o.startswith("hydra")], _own_folder()) for overrides in jobs]
        for config in configs:
            _check_ranks(cast(Config, config))
            if not arguments.multirun:
                _check_resume(cast(Config, config))
            _check_output(cast(Config, config))
        if launched() and configs:
            from hybrid_rl.processes.ranks import join

            _ranks = join(configs[0].rank_timeout, configs[0].device)
    except ConfigError as error:
        after_rank_0()
        print(f"hybrid_rl: {error}", file=sys.stderr)
        return 2
    OmegaConf.register_new_resolver("run_folder", _run_folder, use_cache=True)
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(_job)()
    return _exit_code


def _check_ranks(config: Config) -> None:
    """Raises ConfigError where `ranks` contradicts the launcher, or the ranks of this machine need more GPUs than it has."""
    if world() and config.ranks not in (0, world()):
        raise ConfigError(f"ranks={config.ranks}: the launcher started {world()}; leave ranks out")
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else config.ranks
    if ranks > 1 and config.device != "cpu":
        gpus = _gpus(config)
        if ranks > gpus and (gpus or config.device == "cuda"):
            raise ConfigError(f"ranks={ranks}: torch sees {gpus} GPU(s) and each rank needs one; fewer ranks, or device=cpu")


def _check_resume(config: Config) -> None:
    """Raises ConfigError where resume=must finds no run that it could go on with."""
    if config.resume == "must":
        newest = _newest(config.output_dir, config.name)
        if newest is None:
            raise ConfigError(f"resume=must: there is no run in {config.output_dir}/{config.name} to go on with")
        if (newest / "summary.json").exists():
            raise ConfigError(
                f"resume=must: the newest run, {newest}, reached its end; resume={newest} with more rl.steps trains it further"
            )


def _check_output(config: Config) -> None:
    """Raises ConfigError where a run's folder could not be made; a dry run makes none."""
    if not config.dry_run and config.resume in ("never", "auto", "must"):
        try:
            check_writable(Path(config.output_dir) / config.name)
        except OSError as error:
            raise ConfigError(f"output_dir={config.output_dir}: cannot be written to: {error.strerror}; choose another folder") from error


def _gpus(config: Config) -> int:
    """GPUs of this machine that ranks may use."""
    import torch

    return 0 if config.device == "cpu" else torch.cuda.device_count()


def _jobs(overrides: list[str], sweep: bool) -> list[list[str]]:
    """The overrides of every job: each combination of a sweep, or the one run's."""
    return BasicSweeper.split_arguments(parse(overrides), None)[0] if sweep else [overrides]


def _own_folder() -> Path | None:
    """--config-dir: a user's folder with more recipes and groups."""
    folder = get_args_parser().parse_intermixed_args().config_dir
    return Path(folder) if folder else None


_exit_code = 0
_ranks: Ranks | None = None  # where a launcher started several, this program's own one included


def _job(config: DictConfig) -> None:
    """One job. In a sweep each runs in a process of its own, so that none inherits another's memory or threads."""
    global _exit_code
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    own = [f"--config-dir={_own_folder()}"] if _own_folder() else []
    arguments = ["-m", "hybrid_rl.run", *own, *hydra_config.overrides.task, f"hydra.run.dir={_quoted(folder)}"]
    if hydra_config.mode == RunMode.MULTIRUN:
        if _exit_code > 128:  # a signal ended the job before, and the sweep with it
            return
        print(f"\nsweep job {hydra_config.job.num}: {' '.join(hydra_config.overrides.task)}", flush=True)
        if code := attend([{}], arguments, config.stop_timeout):
            _exit_code = code if code > 128 else 1  # the other jobs still run
        return
    job = cast(Config, OmegaConf.to_object(config))
    ranks = world() or job.ranks or _gpus(job) or 1  # torch loads here, after every setting was checked
    if ranks > 1 and not _ranks:
        _exit_code = launch(ranks, arguments, folder, job.rank_timeout, job.stop_timeout)
        return
    from hybrid_rl.processes.ranks import Ranks
    from hybrid_rl.stages import run

    here = _ranks or Ranks()
    if here.world == 1 and not job.dry_run:
        hangs.alone(job.rank_timeout, folder / "stacks", lambda: end_now(1))
    with listening(job.stop_timeout, speaks=here.main), here.failing():
        _exit_code = run(job, folder, here)


def _quoted(folder: Path) -> str:
    """For Hydra's grammar, to which commas, brackets and = mean something."""
    return "'" + str(folder).replace("'", "\\'") + "'"


def _run_folder(output_dir: str, name: str, resume: str, dry_run: bool) -> str:
    """Rank 0 decides for all."""
    return _ranks.from_main(lambda: _folder(output_dir, name, resume, dry_run)) if _ranks else _folder(output_dir, name, resume, dry_run)


def _folder(output_dir: str, name: str, resume: str, dry_run: bool) -> str:
    """A new folder named by the time; or the one to resume: the newest of this recipe that did not reach its end."""
    if dry_run:
        return "."
    if resume not in ("never", "auto", "must"):
        return resume
    newest = _newest(output_dir, name)
    if resume != "never" and newest and not (newest / "summary.json").exists():
        return str(newest)
    started = f"{output_dir}/{name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    numbered = (f"{started}_{n}" for n in count(2))  # two runs may start in one second
    return next(folder for folder in chain([started], numbered) if not Path(folder).exists())


def _newest(output_dir: str, name: str) -> Path | None:
    """The newest run of a recipe that got as far as to write its settings."""
    return max((settings.parent for settings in (Path(output_dir) / name).glob("*/config.yaml")), default=None)


if __name__ == "__main__":
    sys.exit(main())
