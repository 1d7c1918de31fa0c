"""Compose and check settings before torch loads.

A bad setting gives one line: the key, its value, where it was set, what is wrong and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight.names import (
    CONF,
    PARTS,
    check_names,
    check_open_names,
    composition_problem,
    first_line,
    groups,
    in_open,
    of_hydra,
    parse,
)
from hybrid_rl.preflight.targets import check_saved_targets
from hybrid_rl.preflight.values import value_problems
from hybrid_rl.run_folder.files import Unreadable, check_writable, read_yaml

ConfigStore.instance().store(name="schema", node=Config)


RESUME = ("never", "auto", "must")  # values of resume other than the folder of a run


def load(overrides: Sequence[str], own: Path | None = None) -> DictConfig:
    """Compose, check and return one job's configuration; `own` is a user's folder of more groups. Raises ConfigError.

    When `resume` names a run's folder, its config.yaml takes the place of conf/: overrides change what was saved there.
    """
    parsed = [p for p in parse(overrides) if not of_hydra(p)]
    folders = [CONF, *([own] if own else [])]
    check_names(parsed, folders)
    try:
        run = _resumed_folder(parsed)
        config = _compose(parsed, own) if run is None else _compose_saved(run, parsed, own)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(composition_problem(error, parsed)) from error
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(
            f"{missing[0]}=??? ({_origin(missing[0], parsed, folders, run)}): has no value; set {missing[0]}"
        )
    for key, problem in value_problems(config):
        value = OmegaConf.select(config, key)
        value = value.name if isinstance(value, Enum) else value
        raise ConfigError(f"{key}={value} ({_origin(key, parsed, folders, run)}): {problem}")
    return config


def hydra_folders(overrides: Sequence[str], own: Path | None = None) -> tuple[str, str]:
    """Return hydra.run.dir, "" if nothing sets it, and hydra.sweep.dir. Raises ConfigError for a bad one."""
    parsed = parse(overrides)
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3", job_name="run"):
            config = compose("config", overrides=[*search(own), *overrides], return_hydra_config=True)
            return config.hydra.run.dir, config.hydra.sweep.dir
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(composition_problem(error, parsed)) from error


def _compose(parsed: Sequence[Override], own: Path | None, base: str = "config") -> DictConfig:
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        if any(map(in_open, parsed)):  # composing takes a tenth of a second
            others = [str(p.input_line) for p in parsed if not in_open(p)]
            check_open_names(parsed, compose(base, overrides=[*search(own), *others]))
        return compose(base, overrides=[*search(own), *(str(p.input_line) for p in parsed)])


def search(own: Path | None) -> list[str]:
    """Return the override that makes Hydra search the user's folder of groups too."""
    return [f"hydra.searchpath=[file://{own.resolve()}]"] if own else []


def config_dir(own: Path | None) -> list[str]:
    """Return the argument that names the user's folder of groups to another process."""
    return [f"--config-dir={own}"] if own else []


def run_dir(folder: Path, key: str = "hydra.run.dir") -> str:
    """Return the override of a folder, quoted because commas, brackets and = have a meaning to Hydra."""
    quoted = str(folder).replace("'", "\\'")
    return f"{key}='{quoted}'"


def check_folder(folder: Path, setting: str) -> Path:
    """Return the folder. Raise ConfigError, which names `setting`, if it cannot be made or written to."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(f"{setting}: {there} is a file; choose another folder")
        check_writable(folder if folder.exists() else folder.parent)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot be written to: {error.strerror}; choose another folder") from error
    return folder


def _resumed_folder(parsed: Sequence[Override]) -> Path | None:
    """Return the folder that `resume` names, if it names one. Raises ConfigError if it is not the folder of a run."""
    given = [p for p in parsed if p.key_or_group == "resume"]
    value = given[-1].value() if given else "never"
    if value in RESUME or value is None:
        return None
    folder = Path(str(value))
    if not str(value) or not os.path.isfile(folder / "config.yaml"):
        inside = next(
            (f for f in [*folder.absolute().parents][:2] if str(value) and os.path.isfile(f / "config.yaml")), None
        )
        if inside:
            raise ConfigError(
                f"resume={value} (command line): lies inside a run's folder; name the folder, resume={inside}"
            )
        if not str(value) or not os.path.isdir(folder):  # a folder without config.yaml is reported when that is read
            raise ConfigError(f"resume={value} (command line): must be never, auto, must, or the folder of a run")
    return folder


def _compose_saved(run: Path, parsed: Sequence[Override], own: Path | None) -> DictConfig:
    """Return the settings of a run's folder with overrides on top.

    Overrides of keys apply to the saved settings; an override of a group replaces the section that it composes now.
    """
    chosen = [p for p in parsed if p.key_or_group in groups([CONF, *([own] if own else [])])]
    try:
        saved = read_yaml(run / "config.yaml")
    except Unreadable as error:
        raise ConfigError(f"{error}; resume=never for a new run") from error
    check_saved_targets(saved, run, {str(p.value()) for p in parsed if p.key_or_group.endswith("_target_")})
    if chosen:
        here = OmegaConf.to_container(_compose(parsed, own), enum_to_str=True)
        assert isinstance(here, dict)
        if here["name"] and here["name"] != saved.get("name"):
            raise ConfigError(
                f"resume={run}: is a run of recipe {saved.get('name')}, not of {here['name']}; leave +recipe out"
            )
        for group in chosen:
            if group.key_or_group != "recipe":
                *sections, last = group.key_or_group.split("/")
                into, taken = saved, here
                for section in sections:
                    into, taken = into.setdefault(section, {}), taken[section]
                into[last] = taken[last]
    try:
        node = OmegaConf.merge(OmegaConf.structured(Config), saved)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        what = f"{key}: {first_line(error)}" if key else first_line(error)
        raise ConfigError(f"{run / 'config.yaml'}: {what}; resume=never for a new run") from error
    ConfigStore.instance().store(name="saved", node=node)
    return _compose([p for p in parsed if p not in chosen], own, "saved")


def _origin(key: str, overrides: Sequence[Override], folders: Sequence[Path], run: Path | None = None) -> str:
    """Return where a value was set.

    That is the command line, the run that is resumed, the YAML file that sets it last, or the default in config.py.
    """
    if any(o.key_or_group in (key, key.replace(".", "/"), key.removesuffix(".kind")) for o in overrides):
        return "command line"
    if run:
        return str(run / "config.yaml")
    chosen = {"preset": "tiny", "algo": "grpo"} | {o.key_or_group: str(o.value()) for o in overrides}
    for file in (folder / "algo" / f"{chosen['algo']}.yaml" for folder in folders):
        if file.is_file():  # the parts that an algorithm names, unless the command line names others
            named = OmegaConf.to_container(OmegaConf.load(file)).get("defaults", [])  # type: ignore[union-attr]
            chosen = {
                f"algo/{name}": choice for part in named if isinstance(part, dict) for name, choice in part.items()
            } | chosen
    for group in ("recipe", "preset", "algo", *(part.replace(".", "/") for part in PARTS)):
        path = key.removeprefix(group.replace("/", ".") + ".") if group.startswith("algo") else key
        for folder in folders:
            file = folder / group / f"{chosen.get(group)}.yaml"
            if file.is_file() and OmegaConf.select(OmegaConf.load(file), path) is not None:
                return f"{folder.name}/{group}/{file.name}"
    return "default"
