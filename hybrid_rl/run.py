"""Entry: compose → validate → stages (evaluate, sft, rl, evaluate) → report.

python -m hybrid_rl.run +recipe=reverse                     # train
python -m hybrid_rl.run +recipe=reverse dry_run=true        # check everything, print the plan
python -m hybrid_rl.run +recipe=reverse -m seed=0,1,2       # sweep
python -m hybrid_rl.run +recipe=reverse --cfg job           # the resolved configuration
"""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hybrid_rl.config import Config
from hybrid_rl.validation import CONF, ConfigError, load


def main() -> int:
    """Check every job's settings before anything heavy loads, then let Hydra run them."""
    arguments = get_args_parser().parse_intermixed_args()
    sys.argv[1:] = [a for a in sys.argv[1:] if a not in arguments.overrides] + arguments.overrides  # -m may stand anywhere
    try:
        parsed = OverridesParser.create().parse_overrides(arguments.overrides) if arguments.multirun else []
        jobs = BasicSweeper.split_arguments(parsed, None)[0] if parsed else [arguments.overrides]
        if not (arguments.help or arguments.hydra_help or arguments.info or arguments.cfg):
            for overrides in jobs:
                load([o for o in overrides if not o.startswith("hydra")], Path(arguments.config_dir or CONF))
    except ConfigError as error:
        print(f"hybrid_rl: {error}", file=sys.stderr)
        return 2
    OmegaConf.register_new_resolver("run_folder", _run_folder, use_cache=True)
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(_job)()
    return _exit_code


_exit_code = 0


def _job(config: DictConfig) -> None:
    """One job. In a sweep each runs in a process of its own, so that none inherits another's memory or threads."""
    global _exit_code
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:
        print(f"\nsweep job {hydra_config.job.num}: {' '.join(hydra_config.overrides.task)}", flush=True)
        command = [sys.executable, "-m", "hybrid_rl.run", *hydra_config.overrides.task, f"hydra.run.dir={folder}"]
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
    runs = sorted((Path(output_dir) / name).glob("*/config.yaml"), reverse=True)
    unfinished = next((c.parent for c in runs[:1] if not (c.parent / "summary.json").exists()), None)
    if resume == "auto" and unfinished is not None:
        return str(unfinished)
    return f"{output_dir}/{name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"


if __name__ == "__main__":
    sys.exit(main())
