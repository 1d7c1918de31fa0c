"""What hybrid_rl uses of Hydra and OmegaConf beyond their public interface. No other file uses such names.

Written for hydra-core 1.3 and omegaconf 2.3. tests/preflight/test_hydra_private.py names the installed version and the
missing name if an update removes one. This module does not import torch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's own options (help, cfg, multirun, config_dir, …) and, as `overrides`, all other arguments."""
    return get_args_parser().parse_intermixed_args(list(arguments))


def parse_override(text: str) -> Override:
    """Return one parsed override. Raises HydraException if it is not of the form key=value."""
    return OverridesParser.create().parse_override(text)


def sweep_jobs(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, in Hydra's order."""
    return [list(job) for job in BasicSweeper.split_arguments(list(overrides), None)[0]]


def first_job(overrides: Sequence[Override]) -> list[str]:
    """Return the overrides of a job that a sweeper with intervals may begin with: of each the first value."""
    jobs = []
    for override in overrides:
        value = override.value()
        if override.is_sweep_override() and isinstance(value, IntervalSweep):
            jobs.append(f"{override.get_key_element()}={value.start}")
        else:
            jobs.append(sweep_jobs([override])[0][0])
    return jobs


def section(config: DictConfig, name: str) -> DictConfig | None:
    """Return the section under a key without resolving interpolations; None for a plain value or null."""
    node = config._get_node(name)
    return node if isinstance(node, DictConfig) and not node._is_none() else None


def run_job(function: Callable[[DictConfig], Any], overrides: Sequence[str]) -> Any:
    """Run one job inside `initialize_config_dir` with the config "config"; return what `function` returns."""
    return _hydra().run("config", function, list(overrides)).return_value


def run_sweep(function: Callable[[DictConfig], Any], overrides: Sequence[str]) -> list[Any]:
    """Run a sweep inside `initialize_config_dir` with the config "config"; return the value of `function` for each job.

    The list is empty if a sweeper other than Hydra's own reports no jobs.
    """
    batches = _hydra().multirun("config", function, list(overrides))
    return [job.return_value for batch in batches or () for job in batch]


def _hydra() -> Hydra:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "initialize_config_dir must be active"
    return hydra
