"""The names in overrides: is every key one that exists, and what did its author mean? No torch here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_rl.config import Config, ConfigError


def parse(overrides: Sequence[str]) -> list[Override]:
    parser, parsed = OverridesParser.create(), []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except HydraException as error:
            raise ConfigError(f"{override} (command line): not of the form key=value ({first_line(error)})") from error
    return parsed


def of_hydra(override: Override) -> bool:
    return override.key_or_group == "hydra" or override.is_hydra_override()


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the job, and those of Hydra itself."""
    parsed = parse(overrides)
    return [str(p.input_line) for p in parsed if not of_hydra(p)], [str(p.input_line) for p in parsed if of_hydra(p)]


def groups(folders: Sequence[Path]) -> set[str]:
    """Every group of choices: the folders of YAML files, by their paths."""
    return {str(d.relative_to(folder)) for folder in folders for d in folder.rglob("*") if d.is_dir()}


def check_names(overrides: Sequence[Override], folders: Sequence[Path]) -> None:
    choices, known_keys = groups(folders), set(keys(OmegaConf.structured(Config)))
    for override in overrides:
        key, given = override.key_or_group, f"{override.input_line} (command line)"
        if override.is_sweep_override():
            raise ConfigError(
                f"{given}: several values are a sweep, which needs -m; a text with a comma needs quotes: {key}='\"a,b\"'"
            )
        if override.is_delete() and not in_open(override):
            raise ConfigError(f"{given}: a setting cannot be removed, only changed: {key}=VALUE")
        if in_open(override):
            continue
        value, part = override.get_value_element_as_str(), key.replace(".", "/")
        if key in choices:
            options = sorted(file.stem for folder in folders for file in (folder / key).glob("*.yaml"))
            for choice in value.strip("[]").split(","):  # several of a group as a list
                if choice and choice not in options:
                    more = (
                        "; a recipe is chosen with +recipe=NAME, one of your own with --config-dir FOLDER too"
                        if key == "recipe"
                        else ""
                    )
                    raise ConfigError(
                        f"{key}={value} (command line): there is no such choice; {nearest(choice, options)}{more}"
                    )
            if key == "recipe" and not override.is_add() and not override.is_force_add():
                raise ConfigError(f"{given}: a recipe is added to the settings: +recipe={value}")
        elif part in choices and part != key and not isinstance(override.value(), dict):
            raise ConfigError(f"{given}: a part is chosen with a slash: {part}={value}")
        elif key == "model" and not isinstance(override.value(), dict):
            raise ConfigError(
                f"{given}: is a section; a model folder is chosen with model.path=FOLDER, the training that suits it with "
                f"preset=NAME, there are: {', '.join(sorted(f.stem for d in folders for f in (d / 'preset').glob('*.yaml')))}"
            )
        elif key not in known_keys:
            section = key.rpartition(".")[0]
            known = sorted(k for k in known_keys | choices if section not in known_keys or k.startswith(f"{section}."))
            raise ConfigError(f"{key}={value} (command line): there is no such key; {nearest(key, known, ALL_KEYS)}")


ALL_KEYS = "all of them: hybrid_rl/config.py, or --cfg job"
PACKAGE = Path(__file__).parents[1]
# In a checkout conf/ lies beside the package; an installed wheel carries it inside.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
PARTS = ("algo.advantage", "algo.loss", "algo.aggregation")
OPEN = (
    "data",
    "reward",
    *PARTS,
    "algo.correction",
    "algo.selection",
    "engine.arguments",
)  # their keys are the arguments of functions


def in_open(override: Override) -> bool:
    return any(override.key_or_group.startswith(f"{section}.") for section in OPEN)


def check_open_names(overrides: Sequence[Override], config: DictConfig) -> None:
    for override in filter(in_open, overrides):
        section, _, name = override.key_or_group.rpartition(".")
        known = OmegaConf.select(config, section) or {}
        given = override.value()
        adds = section == "data.template_arguments" or (
            (section, name) == ("data", "template_arguments") and isinstance(given, dict) and given
        )
        if adds and not override.is_add():
            raise ConfigError(
                f"{override.input_line} (command line): is new here; to add it, write +{override.input_line}"
            )
        if name not in known and not override.is_add() and not override.is_force_add():
            near = f"{nearest(name, list(known))}; " if known else ""
            add = f"to add it, write +{section}.{name}={override.get_value_element_as_str()}"
            raise ConfigError(f"{override.input_line} (command line): there is no such key; {near}{add}")


def keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in map(str, config):
        key = f"{prefix}{name}"
        yield key
        child = config._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from keys(child, f"{key}.")


def nearest(name: str, known: Sequence[str], otherwise: str = "") -> str:
    """The known name most like this one, or `otherwise` when none is alike; a key's last part counts most, since that is what one remembers."""

    def alike(k: str) -> float:
        return max(_alike(name, k), 0.99 * _alike(name.rpartition(".")[2], k.rpartition(".")[2]))

    if len(known) <= 4:
        return f"there are: {', '.join(known)}"
    best = max(known, key=lambda k: (alike(k), sorted(name) == sorted(k)))
    if otherwise and alike(best) < ALIKE:
        return otherwise
    return f"did you mean {best}?"


ALIKE = 0.65  # the least likeness of two keys that is worth a question


def _alike(a: str, b: str) -> float:
    """From 0 to 1; a name that begins like the other is more like it than one that shares its letters."""
    shared = difflib.SequenceMatcher(None, a, b).ratio()
    return max(shared, 0.8) if len(a) > 2 and b.startswith(a) else shared


def composition_problem(error: Exception, overrides: Sequence[Override]) -> str:
    """Hydra's and OmegaConf's errors, in one line with the key, the value and what was expected."""
    cause: BaseException = error
    while not isinstance(cause, OmegaConfBaseException) and cause.__cause__ is not None:
        cause = cause.__cause__
    key, line = getattr(cause, "full_key", None), first_line(cause)
    if match := re.match(
        r"Could not append to config. An item is already at '(.*)'|Multiple values for ([^ ]+)\.", first_line(error)
    ):
        return f"+{match[1] or match[2]} (command line): it is there already; leave the + out"
    if match := re.match(r"Could not override '([^.]*)'\.$", first_line(error)):
        return f"{match[1]} (command line): has no choice yet that could be changed; add one: +{match[1]}=NAME"
    if match := re.match(r"Could not override 'hydra\.(.*)'\.$", first_line(error)):
        return f"hydra.{match[1]} (command line): there is no such key of Hydra's"
    if match := re.search(r"Could not find 'hydra/(launcher|sweeper)/(.*)'", first_line(error)):
        return f"hydra/{match[1]}={match[2]} (command line): there is no such {match[1]}; install its plugin, hydra-{match[2]}-{match[1]} perhaps"
    if line.endswith("is not Optional"):
        line = "must not be null"
    given = next((o for o in overrides if o.key_or_group == key), None)
    value = f"={given.get_value_element_as_str()} (command line)" if given else ""
    return f"{key}{value}: {line}" if key else first_line(error)


def first_line(error: BaseException) -> str:
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())
