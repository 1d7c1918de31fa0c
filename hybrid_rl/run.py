"""Entry: compose → validate → stages (evaluate, sft, rl, evaluate) → report.

- train: python -m hybrid_rl.run +recipe=reverse
- check everything, print the plan: python -m hybrid_rl.run +recipe=reverse dry_run=true
- sweep: python -m hybrid_rl.run +recipe=reverse -m seed=0,1,2
- the resolved configuration: python -m hybrid_rl.run +recipe=reverse --cfg job
- a recipe of your own, my_conf/recipe/mine.yaml: python -m hybrid_rl.run --config-dir my_conf +recipe=mine
"""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hybrid_rl.config import Config
from hybrid_rl.validation import CONF, ConfigError, load, parse


def main() -> int:
    """Check every job's settings before anything heavy loads, then let Hydra run them."""
    arguments = get_args_parser().parse_intermixed_args()
    sys.argv[1:] = [a for a in sys.argv[1:] if a not in arguments.overrides] + arguments.overrides  # -m may stand anywhere
    only_shows = arguments.help or arguments.hydra_help or arguments.info or arguments.cfg
    try:
        for overrides in [] if only_shows else _jobs(arguments.overrides, arguments.multirun):
            load([o for o in overrides if not o.startswith("hydra")], _own_folder())
    except ConfigError as error:
        print(f"hybrid_rl: {error}", file=sys.stderr)
        return 2
    OmegaConf.register_new_resolver("run_folder", _run_folder, use_cache=True)
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(_job)()
    return _exit_code


def _jobs(overrides: list[str], sweep: bool) -> list[list[str]]:
    """The overrides of every job: each combination of a sweep, or the one run's."""
    return BasicSweeper.split_arguments(parse(overrides), None)[0] if sweep else [overrides]


def _own_folder() -> Path | None:
    """--config-dir: a user's folder with more recipes and groups."""
    folder = get_args_parser().parse_intermixed_args().config_dir
    return Path(folder) if folder else None


_exit_code = 0


def _job(config: DictConfig) -> None:
    """One job. In a sweep each runs in a process of its own, so that none inherits another's memory or threads."""
    global _exit_code
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:
        print(f"\nsweep job {hydra_config.job.num}: {' '.join(hydra_config.overrides.task)}", flush=True)
        own = [f"--config-dir={_own_folder()}"] if _own_folder() else []
        command = [sys.executable, "-m", "hybrid_rl.run", *own, *hydra_config.overrides.task, f"hydra.run.dir={folder}"]
        if subprocess.run(command, check=False).returncode:
            _exit_code = 1  # the other jobs still run
        return
    from hybrid_rl.stages import run  # torch loads here, after every setting was checked

    _exit_code = run(cast(Config, OmegaConf.to_object(config)), folder)


def _run_folder(output_dir: str, name: str, resume: str, dry_run: bool) -> str:
    """A new folder named by the time; or the one to resume: the newest of this recipe that did not reach its end."""
    if dry_run:
        return "."
    if resume not in ("never", "auto"):
        return resume
    runs = sorted(config.parent for config in (Path(output_dir) / name).glob("*/config.yaml"))
    if resume == "auto" and runs and not (runs[-1] / "summary.json").exists():
        return str(runs[-1])
    started = f"{output_dir}/{name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    numbered = (f"{started}_{n}" for n in count(2))  # two runs may start in one second
    return next(folder for folder in chain([started], numbered) if not Path(folder).exists())


if __name__ == "__main__":
    sys.exit(main())
