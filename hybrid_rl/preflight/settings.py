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

from hybrid_rl.algo.declared import needs, problems, source_of
from hybrid_rl.config import Config, ConfigError, EngineKind, KlEstimator, KlPlace, OldLogprobs, Reference, unbiased_kl
from hybrid_rl.engine.sglang.interface import unusable

PACKAGE = Path(__file__).parents[1]
# In a checkout conf/ lies beside the package; an installed wheel carries it inside.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

ConfigStore.instance().store(name="schema", node=Config)


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
            for choice in value.strip("[]").split(","):  # several of a group as a list
                if choice and choice not in options:
                    raise ConfigError(f"{key}={value} (command line): there is no such choice; {_nearest(choice, options)}")
        elif key not in keys:
            section = key.rpartition(".")[0]
            known = sorted(k for k in keys | groups if section not in keys or k.startswith(f"{section}."))
            raise ConfigError(f"{key}={value} (command line): there is no such key; {_nearest(key, known)}")


PARTS = ("algo.advantage", "algo.loss", "algo.aggregation")
# what a function that a recipe names is called with, before what its own settings add
CALLED_WITH = {
    "data": (),
    "reward": ("completion", "task"),
    "algo.loss": ("tokens",),
    "algo.aggregation": ("kept", "rollout", "max_tokens"),
    "algo.selection": ("minibatch",),
}
NAMED_PARTS = ("correction", "selection")  # any number of each, by name
OPEN = ("data", "reward", *PARTS, "algo.correction", "algo.selection", "engine.arguments")  # their keys are the arguments of functions


def _in_open(override: Override) -> bool:
    return any(override.key_or_group.startswith(f"{section}.") for section in OPEN)


def _check_open_names(overrides: Sequence[Override], config: DictConfig) -> None:
    for override in filter(_in_open, overrides):
        section, _, name = override.key_or_group.rpartition(".")
        known = OmegaConf.select(config, section) or {}
        given = override.value()
        adds = section == "data.template_arguments" or (
            (section, name) == ("data", "template_arguments") and isinstance(given, dict) and given
        )
        if adds and not override.is_add():
            raise ConfigError(f"{override.input_line} (command line): is new here; to add it, write +{override.input_line}")
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
        key=lambda k: (max(_alike(name, k), 0.99 * _alike(name.rpartition(".")[2], k.rpartition(".")[2])), sorted(name) == sorted(k)),
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
    if any(o.key_or_group in (key, key.replace(".", "/")) for o in overrides):
        return "command line"
    chosen = {"model": "tiny", "algo": "grpo"} | {o.key_or_group: str(o.value()) for o in overrides}
    for file in (folder / "algo" / f"{chosen['algo']}.yaml" for folder in folders):
        if file.is_file():  # the parts that an algorithm names, where the command line names no other
            named = OmegaConf.to_container(OmegaConf.load(file)).get("defaults", [])  # type: ignore[union-attr]
            chosen = {f"algo/{name}": choice for part in named if isinstance(part, dict) for name, choice in part.items()} | chosen
    for group in ("recipe", "model", "algo", *(part.replace(".", "/") for part in PARTS)):
        path = key.removeprefix(group.replace("/", ".") + ".") if group.startswith("algo") else key
        for folder in folders:
            file = folder / group / f"{chosen.get(group)}.yaml"
            if file.is_file() and OmegaConf.select(OmegaConf.load(file), path) is not None:
                return f"{folder.name}/{group}/{file.name}"
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
    for key in NOT_NEGATIVE:
        if not 0 <= OmegaConf.select(c, key) < math.inf:
            yield key, "must be a number of at least 0"
    for key in POSITIVE:
        if not (OmegaConf.select(c, key) > 0 and math.isfinite(OmegaConf.select(c, key))):
            yield key, "must be a number above 0"
    for key in ("sft.optimizer.betas", "rl.optimizer.betas", "algo.critic.optimizer.betas"):
        betas = OmegaConf.select(c, key)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield key, "must be two numbers from 0 to below 1, like [0.9, 0.95]"
    r, t = c.rollout, c.model.tiny
    if r.batch_size % r.group_size:
        fitting = min(
            (d for d in range(min(2, r.batch_size), r.batch_size + 1) if r.batch_size % d == 0), key=lambda d: abs(d - r.group_size)
        )
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
    if c.engine.kind == EngineKind.sglang and (why := unusable()):
        yield "engine.kind", why
    if c.engine.tensor_parallel > 1 and c.engine.kind == EngineKind.local:
        yield "engine.tensor_parallel", "is sglang's; engine=local holds the whole weights on every rank, set it to 1"
    elif c.ranks % c.engine.tensor_parallel:
        yield "engine.tensor_parallel", f"does not divide the {c.ranks} ranks; set ranks to a multiple of it"
    if c.policy.lora.rank > 0 and importlib.util.find_spec("peft") is None:
        yield "policy.lora.rank", "adapters need peft, which is not installed; pip install 'hybrid_rl[lora]'"
    if c.policy.lora.rank > 0 and not c.policy.lora.targets:
        yield "policy.lora.targets", "names no module; all-linear means all of them"
    if c.algo.reference == Reference.base and c.policy.lora.rank == 0:
        yield "algo.reference", "is the policy without its adapters, and policy.lora.rank=0 means it has none; use frozen"
    yield from _algo_problems(c)
    if c.device not in ("auto", "cpu", "cuda"):
        yield "device", f"{_nearest(c.device, ['auto', 'cpu', 'cuda'])}"
    if c.resume not in ("never", "auto", "must") and not Path(c.resume).is_dir():
        yield "resume", "must be never, auto, must, or the folder of a run"
    if c.rl.keep_best and not c.rl.eval_every:
        yield "rl.keep_best", "compares evaluations, and rl.eval_every=0 means there are none between steps; set rl.eval_every"
    if c.model.path is not None:
        folder = Path(c.model.path)
        if not c.model.path or not (folder / "config.json").is_file():
            yield (
                "model.path",
                "is not a Hugging Face model folder on this disk (one with a config.json); set model.path=/path/to/the/folder",
            )
        elif not any(folder.glob("*.safetensors")):
            yield "model.path", "has no *.safetensors file; weights are read in that format only"
    for key in ("data", "reward"):
        yield from _part_problems(key, c)


def _part_problems(key: str, c: DictConfig) -> Iterator[tuple[str, str]]:
    """Of the function at `key`, and what it states about its arguments and other settings."""
    node = OmegaConf.to_container(OmegaConf.select(c, key))
    called_with = CALLED_WITH.get(key) or CALLED_WITH.get(key.rpartition(".")[0], ("batch",))
    if key == "data" and isinstance(node, dict):
        arguments = node.pop("template_arguments", None)  # they are the renderer's
        if not isinstance(arguments, dict | None):
            yield "data.template_arguments", "must be a mapping of the chat template's variables, like {enable_thinking: false}"
    if problem := _target_problem(node, called_with):
        yield problem[0] and f"{key}.{problem[0]}", problem[1]
    elif key.startswith("algo."):
        yield from problems(key, node, c)


def _algo_problems(c: DictConfig) -> Iterator[tuple[str, str]]:
    algo = c.algo
    for key in (*PARTS, *(f"algo.{kind}.{name}" for kind in NAMED_PARTS for name in algo[kind])):
        yield from _part_problems(key, c)
    wanted = needs(OmegaConf.to_container(algo.advantage))
    if algo.kl.coef and algo.reference == Reference.none:
        yield "algo.kl.coef", "needs a model to measure the distance from; set algo.reference=frozen"
    elif algo.kl.coef and algo.kl.place == KlPlace.loss and algo.kl.estimator == KlEstimator.k1 and not unbiased_kl(algo):
        yield "algo.kl.estimator", "as a loss has no gradient on average; use k2 or k3, algo.kl.unbiased=true, or algo.kl.place=reward"
    elif algo.kl.unbiased and algo.kl.place == KlPlace.reward:
        yield "algo.kl.unbiased", "is of a KL in the loss, and algo.kl.place=reward puts it into the reward; leave it out"
    elif algo.kl.target and not algo.kl.coef:
        yield "algo.kl.target", "steers algo.kl.coef, which is 0 and would stay 0; begin with algo.kl.coef=0.01, say"
    if algo.correction and algo.old_logprobs != OldLogprobs.recomputed:
        yield "algo.correction", "compares the trainer's log-probabilities with the engine's; set algo.old_logprobs=recomputed"
    if algo.correction and (c.rollout.top_k or c.rollout.top_p < 1):
        yield (
            "algo.correction",
            (
                "weighs tokens by whole distributions, and rollout.top_k or rollout.top_p cut the one that is sampled from; "
                "use rollout.top_k=0 rollout.top_p=1, or no correction"
            ),
        )
    if c.rollout.group_size == 1 and algo.silent_by != "none":
        yield "rollout.group_size", "makes every group silent; use 2 or more, or algo.silent_by=none"
    if c.rollout.group_size == 1 and "group" in needs({"_target_": algo.advantage._target_}):
        yield "rollout.group_size", f"leaves {algo.advantage._target_} nothing to compare with; use 2 or more"
    if "teacher_logprobs" in wanted and algo.teacher is None:
        yield "algo.teacher", "is missing: algo.advantage learns from one; set algo.teacher=/path/to/a/model/folder"
    elif "teacher_logprobs" not in wanted and algo.teacher is not None:
        yield "algo.teacher", "is asked by no one; use algo=opd, or leave it out"
    if algo.teacher is not None and not (Path(algo.teacher) / "config.json").is_file():
        yield "algo.teacher", "is not a Hugging Face model folder on this disk (one with a config.json)"
    if algo.critic.path is not None and not (Path(algo.critic.path) / "config.json").is_file():
        yield "algo.critic.path", "is not a Hugging Face model folder on this disk (one with a config.json)"


LEAST = {
    "rollout.batch_size": 1, "rollout.group_size": 1, "rollout.max_tokens": 1, "rollout.max_prompt_tokens": 1,
    "rollout.top_k": 0, "rollout.max_replacements": 0, "rollout.reward_workers": 1, "engine.slots": 1, "engine.tensor_parallel": 1,
    "engine.restarts": 0, "policy.row_tokens": 2,
    "policy.max_bad_steps": 1, "policy.shard": 0, "policy.lora.rank": 0, "policy.lora.alpha": 1, "handover.bucket_mib": 1,
    "sft.steps": 0, "sft.batch_size": 1, "sft.checkpoint_every": 0, "rl.steps": 0, "algo.minibatches": 1, "algo.epochs": 1,
    "algo.kl.horizon": 1, "algo.critic.warmup_steps": 0, "algo.critic.optimizer.warmup_steps": 0,
    "rl.checkpoint_every": 1, "rl.keep_checkpoints": 1, "rl.eval_every": 0, "rl.max_empty_steps": 0, "rollout.keep_steps": 0, "eval.temperature": 0, "eval.samples": 1,
    "eval.max_tasks": 0, "threads": 0, "ranks": 0, "seed": 0, "sft.optimizer.warmup_steps": 0, "rl.optimizer.warmup_steps": 0,
    "sft.optimizer.weight_decay": 0, "rl.optimizer.weight_decay": 0, "model.tiny.layers": 1, "model.tiny.heads": 1,
    "model.tiny.kv_heads": 1, "model.tiny.hidden_size": 1, "model.tiny.head_dim": 2, "model.tiny.intermediate_size": 1,
}  # fmt: skip
BETWEEN = {
    "rollout.top_p": (1e-6, 1.0),
    "rollout.max_reward_failures": (0, 1),
    "engine.memory_fraction": (0, 0.95),
    "sft.curriculum": (0, 1),
    "sft.label_smoothing": (0, 0.9),
    "algo.overlong_share": (0, 1),
    "sft.optimizer.final_lr": (0, 1),
    "rl.optimizer.final_lr": (0, 1),
    "eval.pass_reward": (-1e6, 1e6),
}
NOT_NEGATIVE = ("algo.kl.coef", "algo.kl.target", "algo.entropy_coef", "algo.overlong_penalty", "algo.critic.clip")
POSITIVE = (
    "rank_timeout", "stop_timeout", "checkpoint.timeout", "engine.timeout", "engine.start_timeout", "rollout.temperature",
    "rollout.reward_timeout", "rollout.reward_start_timeout",
    *(f"{stage}.optimizer.{key}" for stage in ("sft", "rl", "algo.critic") for key in ("lr", "eps", "max_grad_norm")),
    "model.tiny.rope_theta", "model.tiny.init_std",
)  # fmt: skip


def _target_problem(node: Any, called_with: tuple[str, ...]) -> tuple[str, str] | None:
    """Check a `_target_` and its arguments against the function's source, without importing it (it may import torch)."""
    if not node or "_target_" not in node:
        return "_target_", "names no function; the recipe must set it"
    module, _, name = node["_target_"].rpartition(".")
    source = source_of(module)
    if source is None:
        if source_of(module.rpartition(".")[0]):  # an attribute of a class
            return None
        return "_target_", f"there is no module {module!r} on the Python path"
    if source.suffix != ".py":  # compiled
        return None
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"), str(source))
    except (SyntaxError, UnicodeDecodeError) as error:
        return "_target_", f"{source} is not Python: {error}"
    definitions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    found = definitions.get(name)
    if found is None and _bound_otherwise(tree, name):
        return None
    public = sorted(d for d in definitions if not d.startswith("_"))
    if found is None:
        return "_target_", f"{module} defines no {name!r}; {_nearest(name, public)}"
    if isinstance(found, ast.ClassDef):
        found = next((n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if found is None or found.decorator_list:  # a decorator may change what it takes
        return None
    positional = [a.arg for a in (*found.args.posonlyargs, *found.args.args) if a.arg != "self"]
    named = [a.arg for a in found.args.kwonlyargs]
    accepted = positional + named
    for argument in node:
        if argument not in accepted and not argument.startswith("_") and not found.args.kwarg:
            return argument, f"{module}.{name} takes no such argument; {_nearest(argument, accepted)}"
    for argument, choices in _choices(found).items():
        if argument in node and node[argument] not in choices:
            return argument, f"{module}.{name} knows {', '.join(map(repr, choices))}"
    if len(positional) < len(called_with) and not found.args.vararg:
        return "_target_", f"{module}.{name} is called with ({', '.join(called_with)}) and takes {len(positional)} arguments"
    optional = positional[len(positional) - len(found.args.defaults) :]
    optional += [name for name, default in zip(named, found.args.kw_defaults, strict=True) if default]
    for argument in positional[len(called_with) :] + named:
        if argument not in optional and argument not in node and "_args_" not in node:
            return argument, f"is missing, and {module}.{name} needs it"
    return None


def _bound_otherwise(tree: ast.Module, name: str) -> bool:
    """Whether a module may have the name from an import, an assignment or a block: only running it would tell what it is."""
    for node in ast.walk(tree):
        match node:
            case ast.alias(name=imported, asname=alias) if name == (alias or imported.partition(".")[0]) or imported == "*":
                return True
            case ast.Name(id=bound, ctx=ast.Store()) if bound == name:
                return True
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound) if bound == name:
                return True
    return False


def _choices(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[Any]]:
    """The values of each argument that is annotated as Literal[...]."""
    found: dict[str, list[Any]] = {}
    for argument in (*function.args.args, *function.args.kwonlyargs):
        match argument.annotation:
            case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
                elements = choices.elts if isinstance(choices, ast.Tuple) else [choices]
                found[argument.arg] = [element.value for element in elements if isinstance(element, ast.Constant)]
    return found
