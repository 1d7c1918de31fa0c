"""Bad settings end in one line, before torch loads: the key, its value, where it was set, and what would be right."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_rl.config import Config, EngineKind, Reference

PACKAGE = Path(__file__).parent
# In a checkout conf/ lies beside the package; an installed wheel carries it inside.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

ConfigStore.instance().store(name="schema", node=Config)


class ConfigError(ValueError):
    """One line that a user can act on."""


def load(overrides: Sequence[str], own: Path | None = None) -> DictConfig:
    """Compose and check one job's configuration; `own` is a user's folder of more groups. Raises ConfigError."""
    parsed = parse(overrides)
    folders = [CONF, *([own] if own else [])]
    _check_names(parsed, folders)
    search = [f"hydra.searchpath=[file://{own.resolve()}]"] if own else []
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            config = compose("config", overrides=search + [o for o, p in zip(overrides, parsed, strict=True) if not _in_open(p)])
            _check_open_names(parsed, config)
            config = compose("config", overrides=[*search, *overrides])
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_composition_problem(error, parsed)) from error
    for key, problem in _problems(config):
        value = OmegaConf.select(config, key)
        raise ConfigError(f"{key}={value} ({_origin(key, parsed, folders)}): {problem}")
    return config


# ---- names: is every override's key one that exists? ------------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    parser, parsed = OverridesParser.create(), []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except HydraException as error:
            raise ConfigError(f"{override} (command line): not of the form key=value ({_first_line(error)})") from error
    return parsed


def _check_names(overrides: Sequence[Override], folders: Sequence[Path]) -> None:
    groups = {str(d.relative_to(folder)) for folder in folders for d in folder.rglob("*") if d.is_dir()}
    keys = set(_keys(OmegaConf.structured(Config)))
    for override in overrides:
        key, value = override.key_or_group, override.get_value_element_as_str()
        if key.startswith("hydra") or _in_open(override):
            continue
        if key in groups:
            options = sorted(file.stem for folder in folders for file in (folder / key).glob("*.yaml"))
            if value not in options:
                raise ConfigError(f"{key}={value} (command line): there is no such choice; {_nearest(value, options)}")
        elif key not in keys:
            section = key.rpartition(".")[0]
            known = sorted(k for k in keys | groups if section not in keys or k.startswith(f"{section}."))
            raise ConfigError(f"{key}={value} (command line): there is no such key; {_nearest(key, known)}")


OPEN = ("data", "reward", "algo.advantage", "algo.loss")  # their keys are the arguments of a function


def _in_open(override: Override) -> bool:
    return any(override.key_or_group.startswith(f"{section}.") for section in OPEN)


def _check_open_names(overrides: Sequence[Override], config: DictConfig) -> None:
    for override in filter(_in_open, overrides):
        section, _, name = override.key_or_group.rpartition(".")
        known = OmegaConf.select(config, section) or {}
        if name not in known and not override.is_add():
            raise ConfigError(f"{section}.{name}={override.value()} (command line): there is no such key; {_nearest(name, list(known))}")


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in map(str, config):
        key = f"{prefix}{name}"
        yield key
        child = config._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _keys(child, f"{key}.")


def _nearest(name: str, known: Sequence[str]) -> str:
    """The known name most like this one; a key's last part counts most, since that is what one remembers."""
    ranked = sorted(
        known,
        key=lambda k: max(_alike(name, k), 0.99 * _alike(name.rpartition(".")[2], k.rpartition(".")[2])),
        reverse=True,
    )
    return f"did you mean {ranked[0]}?" if ranked and len(known) > 4 else f"there are: {', '.join(known)}"


def _alike(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _composition_problem(error: Exception, overrides: Sequence[Override]) -> str:
    """Hydra's and OmegaConf's errors, in one line with the key, the value and what was expected."""
    cause: BaseException = error
    while not isinstance(cause, OmegaConfBaseException) and cause.__cause__ is not None:
        cause = cause.__cause__
    key = getattr(cause, "full_key", None)
    given = next((o for o in overrides if o.key_or_group == key), None)
    value = f"={given.get_value_element_as_str()} (command line)" if given else ""
    return f"{key}{value}: {_first_line(cause)}" if key else _first_line(error)


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).strip().splitlines()[0].split())


def _origin(key: str, overrides: Sequence[Override], folders: Sequence[Path]) -> str:
    """Where the value came from: the command line, the YAML file that sets it last, or the default in config.py."""
    if any(o.key_or_group == key for o in overrides):
        return "command line"
    chosen = {"model": "tiny", "algo": "grpo"} | {o.key_or_group: str(o.value()) for o in overrides}
    for group in ("recipe", "model", "algo"):
        path = key if group != "algo" else key.removeprefix("algo.")
        for file in (folder / group / f"{chosen.get(group)}.yaml" for folder in folders):
            if file.is_file() and OmegaConf.select(OmegaConf.load(file), path) is not None:
                return f"{file.parent.parent.name}/{group}/{file.name}"
    return "default"


# ---- values: does the combination make sense? -------------------------------------------------------------------------


def _problems(c: DictConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong and what would be right), in the order a reader would want to hear them."""
    if not c.name:
        recipes = ", ".join(sorted(file.stem for file in (CONF / "recipe").glob("*.yaml")))
        yield "name", f"no recipe was chosen; add +recipe=NAME, there are: {recipes}"
    for key, least in LEAST.items():
        if OmegaConf.select(c, key) < least:
            yield key, f"must be at least {least}"
    for key, (low, high) in BETWEEN.items():
        if not low <= OmegaConf.select(c, key) <= high:
            yield key, f"must be between {low:g} and {high:g}"
    for key in POSITIVE:
        if not (OmegaConf.select(c, key) > 0 and math.isfinite(OmegaConf.select(c, key))):
            yield key, "must be a number above 0"
    for key in ("sft.optimizer.betas", "rl.optimizer.betas"):
        betas = OmegaConf.select(c, key)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield key, "must be two numbers from 0 to below 1, like [0.9, 0.95]"
    r, t = c.rollout, c.model.tiny
    if r.batch_size % r.group_size:
        fitting = min((d for d in range(2, r.batch_size + 1) if r.batch_size % d == 0), key=lambda d: abs(d - r.group_size))
        yield "rollout.group_size", f"does not divide rollout.batch_size={r.batch_size}; the nearest that does is {fitting}"
    elif (r.batch_size // r.group_size) % c.algo.minibatches:
        groups = r.batch_size // r.group_size
        fitting = min((d for d in range(1, groups + 1) if groups % d == 0), key=lambda d: abs(d - c.algo.minibatches))
        yield (
            "algo.minibatches",
            f"does not divide the {groups} groups of a batch (whole groups stay together); the nearest that does is {fitting}",
        )
    room = c.policy.row_tokens - r.max_prompt_tokens
    if r.max_tokens > room:
        fix = f"at most {room} fit" if room > 0 else f"set policy.row_tokens to {r.max_prompt_tokens + r.max_tokens} or more"
        yield (
            "rollout.max_tokens",
            (
                f"with rollout.max_prompt_tokens={r.max_prompt_tokens} a sample is longer than a row of policy.row_tokens={c.policy.row_tokens}; {fix}"
            ),
        )
    if t.heads % t.kv_heads:
        yield "model.tiny.kv_heads", f"must divide model.tiny.heads={t.heads}"
    if t.head_dim % 2:
        yield "model.tiny.head_dim", f"must be even (rotary embedding); the nearest is {t.head_dim + 1}"
    if c.engine.kind == EngineKind.sglang and importlib.util.find_spec("sglang") is None:
        yield "engine.kind", "SGLang is not installed; pip install 'hybrid_rl[sglang]', or engine=local"
    if c.policy.lora.rank > 0 and importlib.util.find_spec("peft") is None:
        yield "policy.lora.rank", "adapters need peft, which is not installed; pip install 'hybrid_rl[lora]'"
    if c.policy.lora.rank > 0 and not c.policy.lora.targets:
        yield "policy.lora.targets", "names no module; all-linear means all of them"
    if c.algo.reference == Reference.base and c.policy.lora.rank == 0:
        yield "algo.reference", "is the policy without its adapters, and policy.lora.rank=0 means it has none; use frozen"
    if not 0 <= c.algo.kl_coef < math.inf:
        yield "algo.kl_coef", "must be a number of at least 0"
    elif c.algo.kl_coef and c.algo.reference == Reference.none:
        yield "algo.kl_coef", "needs a model to measure the distance from; set algo.reference=frozen"
    if c.device not in ("auto", "cpu", "cuda"):
        yield "device", f"{_nearest(c.device, ['auto', 'cpu', 'cuda'])}"
    if c.resume not in ("never", "auto") and not Path(c.resume).is_dir():
        yield "resume", "must be never, auto, or the folder of a run"
    if c.model.path is not None:
        folder = Path(c.model.path)
        if not c.model.path or not (folder / "config.json").is_file():
            yield (
                "model.path",
                "is not a Hugging Face model folder on this disk (one with a config.json); set model.path=/path/to/the/folder",
            )
        elif not any(folder.glob("*.safetensors")):
            yield "model.path", "has no *.safetensors file; weights are read in that format only"
    for key in ("data", "reward", "algo.advantage", "algo.loss"):
        if problem := _target_problem(OmegaConf.to_container(OmegaConf.select(c, key))):
            yield problem[0] and f"{key}.{problem[0]}", problem[1]


LEAST = {
    "rollout.batch_size": 2, "rollout.group_size": 2, "rollout.max_tokens": 1, "rollout.max_prompt_tokens": 1,
    "rollout.top_k": 0, "rollout.max_replacements": 0, "rollout.reward_workers": 1, "engine.slots": 1, "policy.row_tokens": 2,
    "policy.max_bad_steps": 1, "policy.shard": 0, "policy.lora.rank": 0, "policy.lora.alpha": 1, "handover.bucket_mib": 1,
    "sft.steps": 0, "sft.batch_size": 1, "sft.checkpoint_every": 0, "rl.steps": 0, "algo.minibatches": 1,
    "rl.checkpoint_every": 1, "rl.keep_checkpoints": 1, "rl.eval_every": 0, "eval.temperature": 0, "eval.samples": 1,
    "eval.max_tasks": 0, "threads": 0, "ranks": 0, "seed": 0, "sft.optimizer.warmup_steps": 0, "rl.optimizer.warmup_steps": 0,
    "sft.optimizer.weight_decay": 0, "rl.optimizer.weight_decay": 0, "model.tiny.layers": 1, "model.tiny.heads": 1,
    "model.tiny.kv_heads": 1, "model.tiny.hidden_size": 1, "model.tiny.head_dim": 2, "model.tiny.intermediate_size": 1,
}  # fmt: skip
BETWEEN = {
    "rollout.top_p": (1e-6, 1.0),
    "engine.memory_fraction": (0.05, 0.95),
    "sft.curriculum": (0, 1),
    "sft.label_smoothing": (0, 0.9),
    "sft.optimizer.final_lr": (0, 1),
    "rl.optimizer.final_lr": (0, 1),
}
POSITIVE = (
    "rank_timeout", "rollout.temperature", "rollout.reward_timeout",
    "sft.optimizer.lr", "rl.optimizer.lr", "sft.optimizer.eps", "rl.optimizer.eps",
    "sft.optimizer.max_grad_norm", "rl.optimizer.max_grad_norm", "model.tiny.rope_theta", "model.tiny.init_std",
)  # fmt: skip


def _target_problem(node: Any) -> tuple[str, str] | None:
    """Check a `_target_` and its arguments against the function's source, without importing it (it may import torch)."""
    if not node or "_target_" not in node:
        return "_target_", "names no function; the recipe must set it"
    module, _, name = node["_target_"].rpartition(".")
    try:
        spec = importlib.util.find_spec(module) if module else None
    except ImportError:
        spec = None
    if spec is None or not spec.origin:
        return "_target_", f"there is no module {module!r} on the Python path"
    definitions = {
        n.name: n for n in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    }
    found = definitions.get(name)
    public = sorted(d for d in definitions if not d.startswith("_"))
    if found is None:
        return "_target_", f"{module} defines no {name!r}; {_nearest(name, public)}"
    if isinstance(found, ast.ClassDef):
        found = next((n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if found is None or found.args.kwarg:
        return None
    accepted = [a.arg for a in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs) if a.arg != "self"]
    for argument in node:
        if argument not in accepted and not argument.startswith("_"):
            return argument, f"{module}.{name} takes no such argument; {_nearest(argument, accepted)}"
    return None
