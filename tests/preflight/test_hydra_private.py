"""The private names of Hydra and OmegaConf that hybrid_rl uses exist, behave as expected, and are used in one file."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

import hybrid_rl

NAMES = [
    ("hydra-core", "hydra._internal.utils", "get_args_parser"),
    ("hydra-core", "hydra._internal.core_plugins.basic_sweeper", "BasicSweeper.split_arguments"),
    ("hydra-core", "hydra._internal.hydra", "Hydra.run"),
    ("hydra-core", "hydra._internal.hydra", "Hydra.multirun"),
    ("hydra-core", "hydra.core.global_hydra", "GlobalHydra.instance"),
    ("hydra-core", "hydra.core.override_parser.overrides_parser", "OverridesParser.create"),
    ("hydra-core", "hydra.core.override_parser.overrides_parser", "OverridesParser.parse_override"),
    ("omegaconf", "omegaconf", "DictConfig._get_node"),
    ("omegaconf", "omegaconf", "DictConfig._is_none"),
]


def check(package: str, module: str, name: str) -> None:
    """Fail with the installed version and the missing name."""
    problem = (
        f"{package} {importlib.metadata.version(package)} has no {module}.{name}, used by preflight/hydra_private.py"
    )
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        pytest.fail(problem)
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            pytest.fail(problem)


@pytest.mark.parametrize(("package", "module", "name"), NAMES)
def test_the_private_name_exists(package: str, module: str, name: str) -> None:
    check(package, module, name)


@pytest.mark.parametrize(("module", "name"), [("hydra._internal.utils", "gone"), ("hydra._internal.gone", "x")])
def test_a_missing_name_is_reported_with_the_version(module: str, name: str) -> None:
    version = re.escape(importlib.metadata.version("hydra-core"))
    with pytest.raises(pytest.fail.Exception, match=f"^hydra-core {version} has no {module}.{name}, used by"):
        check("hydra-core", module, name)


def test_arguments_and_sweeps_are_split_as_hydra_splits_them() -> None:
    from hybrid_rl.preflight.hydra_private import parse_arguments, parse_override, sweep_jobs

    given = parse_arguments(["-m", "a=1,2", "--config-dir", "own", "b=3"])
    assert (given.multirun, given.config_dir, given.overrides) == (True, "own", ["a=1,2", "b=3"])
    assert sweep_jobs([parse_override(o) for o in given.overrides]) == [["a=1", "b=3"], ["a=2", "b=3"]]


def test_no_other_file_uses_a_private_name() -> None:
    private = re.compile(r"hydra\._internal|OverridesParser|BasicSweeper|GlobalHydra|\._get_node\(|\._is_none\(")
    folder = Path(hybrid_rl.__file__).parent
    using = {f.relative_to(folder).as_posix() for f in folder.rglob("*.py") if private.search(f.read_text("utf-8"))}
    assert using == {"preflight/hydra_private.py"}
