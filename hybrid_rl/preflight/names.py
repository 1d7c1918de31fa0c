"""Check the names in overrides, and suggest the nearest names for those that do not exist; without importing torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight.hydra_private import parse_override, section


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the parsed overrides. Raises ConfigError for one that is not of the form key=value."""
    parsed = []
    for override in overrides:
        try:
            parsed.append(parse_override(override))
        except HydraException as error:
            raise ConfigError(f"{override} (command line): not of the form key=value ({first_line(error)})") from error
    return parsed


def of_hydra(override: Override) -> bool:
    """Return whether the override is of a setting of Hydra itself."""
    return override.key_or_group == "hydra" or override.is_hydra_override()


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the job, and those of Hydra's own settings."""
    parsed = parse(overrides)
    return [str(p.input_line) for p in parsed if not of_hydra(p)], [str(p.input_line) for p in parsed if of_hydra(p)]


def groups(folders: Sequence[Path]) -> set[str]:
    """Return every config group: the paths of the folders of YAML files."""
    return {str(d.relative_to(folder)) for folder in folders for d in folder.rglob("*") if d.is_dir()}


def check_names(overrides: Sequence[Override], folders: Sequence[Path]) -> None:
    """Raise ConfigError for a key or a group choice that does not exist, a removal, or a sweep without -m."""
    choices, known_keys = groups(folders), set(keys(OmegaConf.structured(Config)))
    for override in overrides:
        key, given = override.key_or_group, f"{override.input_line} (command line)"
        if override.is_sweep_override():
            raise ConfigError(
                f"{given}: several values are a sweep, which needs -m; "
                f"a text with a comma needs quotes: {key}='\"a,b\"'"
            )
        if override.is_delete() and not in_open(override):
            raise ConfigError(f"{given}: a setting cannot be removed, only changed: {key}=VALUE")
        if in_open(override):
            continue
        value, part = override.get_value_element_as_str(), key.replace(".", "/")
        if key in choices:
            options = sorted(file.stem for folder in folders for file in (folder / key).glob("*.yaml"))
            for choice in value.strip("[]").split(","):  # a list chooses several of a group
                if choice and choice not in options:
                    near = nearest(choice, options, f"there are: {', '.join(options)}")
                    line = f"{key}={value} (command line): there is no such choice; {near}"
                    if key == "recipe":
                        line += "; a recipe is chosen with +recipe=NAME, one of your own with --config-dir FOLDER too"
                    raise ConfigError(line)
                if options.count(choice) > 1:
                    own = next(
                        f for folder in folders if folder != CONF and (f := folder / key / f"{choice}.yaml").exists()
                    )
                    raise ConfigError(f"{given}: hybrid_rl has a {key} {choice} too, which would be used; rename {own}")
            if key == "recipe" and not override.is_add() and not override.is_force_add():
                raise ConfigError(f"{given}: a recipe is added to the settings: +recipe={value}")
        elif part in choices and part != key and not isinstance(override.value(), dict):
            raise ConfigError(f"{given}: a part is chosen with a slash: {part}={value}")
        elif key == "model" and not isinstance(override.value(), dict):
            presets = ", ".join(sorted(f.stem for folder in folders for f in (folder / "preset").glob("*.yaml")))
            raise ConfigError(
                f"{given}: is a section; a model folder is chosen with model.path=FOLDER, the training that suits it "
                f"with preset=NAME, there are: {presets}"
            )
        elif key not in known_keys:
            parent = key.rpartition(".")[0]
            known = sorted(k for k in known_keys | choices if parent not in known_keys or k.startswith(f"{parent}."))
            raise ConfigError(f"{key}={value} (command line): there is no such key; {nearest(key, known, ALL_KEYS)}")


ALL_KEYS = "all of them: hybrid_rl/config.py, or --cfg job"
PACKAGE = Path(__file__).parents[1]
# in a checkout conf/ lies beside the package, in an installed wheel inside it
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
PARTS = ("algo.advantage", "algo.loss", "algo.aggregation")
# keys of data that hold names of the user's own
OWN_NAMES = ("data.template_arguments", "data.weights", "data.curriculum")
# sections whose keys are the arguments of functions
OPEN = (
    "data",
    "reward",
    "environment",
    *PARTS,
    "algo.correction",
    "algo.selection",
    "engine.arguments",
    "tracker.arguments",
)


def in_open(override: Override) -> bool:
    """Return whether the key lies in a section whose keys are the arguments of functions."""
    return override.key_or_group.startswith(tuple(f"{name}." for name in OPEN))


def check_open_names(overrides: Sequence[Override], config: DictConfig) -> None:
    """Raise ConfigError for an argument that the composed `config` does not have and that is not added with +."""
    for override in filter(in_open, overrides):
        place, _, name = override.key_or_group.rpartition(".")
        known = list(OmegaConf.select(config, place) or {})  # a key without a value yet (???) is not `in` the node
        given = override.value()
        adds = place in OWN_NAMES or (f"{place}.{name}" in OWN_NAMES and isinstance(given, dict) and given)
        if adds and not override.is_add():
            line = override.input_line
            raise ConfigError(f"{line} (command line): there is no such key; to add it, write +{line}")
        if name not in known and not override.is_add() and not override.is_force_add():
            near = f"{nearest(name, known)}; " if known else ""
            add = f"to add it, write +{place}.{name}={override.get_value_element_as_str()}"
            raise ConfigError(f"{override.input_line} (command line): there is no such key; {near}{add}")


def keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key of the configuration, sections included, with its path."""
    for name in map(str, config):
        key = f"{prefix}{name}"
        yield key
        if (child := section(config, name)) is not None:
            yield from keys(child, f"{key}.")


def nearest(name: str, known: Sequence[str], otherwise: str = "") -> str:
    """Return a hint with the known name most similar to this one, or `otherwise` if none is similar.

    The last parts of keys count too, since they are what users remember. Up to four known names are all listed.
    """

    def alike(k: str) -> float:
        return max(_alike(name, k), 0.99 * _alike(name.rpartition(".")[2], k.rpartition(".")[2]))

    if len(known) <= 4:
        return f"there are: {', '.join(known)}"
    best = max(known, key=lambda k: (alike(k), sorted(name) == sorted(k)))
    if otherwise and alike(best) < ALIKE:
        return otherwise
    return f"did you mean {best}?"


ALIKE = 0.65  # the smallest similarity of two keys for which one is suggested


def _alike(a: str, b: str) -> float:
    """Return the similarity from 0 to 1; it is at least 0.8 if the second name begins with the first."""
    shared = difflib.SequenceMatcher(None, a, b).ratio()
    return max(shared, 0.8) if len(a) > 2 and b.startswith(a) else shared


def composition_problem(error: Exception, overrides: Sequence[Override]) -> str:
    """Return an error of Hydra or OmegaConf as one line with the key, the value and what was expected."""
    cause: BaseException = error
    while not isinstance(cause, OmegaConfBaseException) and cause.__cause__ is not None:
        cause = cause.__cause__
    key, line = getattr(cause, "full_key", None), first_line(cause)
    if match := re.match(
        r"Could not append to config. An item is already at '(.*)'|Multiple values for ([^ ]+)\.", first_line(error)
    ):
        return f"+{match[1] or match[2]} (command line): it is there already; leave the + out"
    if match := re.match(r"Could not override '([^.]*)'\.$", first_line(error)):
        return f"{match[1]} (command line): nothing is chosen yet; add a choice: +{match[1]}=NAME"
    if match := re.match(r"Could not override 'hydra\.(.*)'\.$", first_line(error)):
        return f"hydra.{match[1]} (command line): Hydra has no such key"
    if match := re.search(r"Could not find 'hydra/(launcher|sweeper)/(.*)'", first_line(error)):
        kind, name = match[1], match[2]
        plugin = f"hydra-{name.partition('_')[0]}-{kind}"
        return (
            f"hydra/{kind}={name} (command line): there is no such {kind}; install its plugin, perhaps {plugin} "
            "(pip install -e '.[sweeps]' has joblib, submitit and optuna)"
        )
    if line.endswith("is not Optional"):
        line = "must not be null"
    given = next((o for o in overrides if o.key_or_group == key), None)
    value = f"={given.get_value_element_as_str()} (command line)" if given else ""
    return f"{key}{value}: {line}" if key else first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its type if it has none."""
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())
