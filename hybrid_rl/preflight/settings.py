"""Bad settings end in one line, before torch loads: the key, its value, where it was set, and what would be right."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import site
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_rl.algo.declared import needs, problems, source_of
from hybrid_rl.config import Config, ConfigError, EngineKind, KlEstimator, KlPlace, OldLogprobs, Reference, unbiased_kl
from hybrid_rl.engine.sglang.interface import unusable
from hybrid_rl.preflight.names import (
    PARTS,
    check_names,
    check_open_names,
    composition_problem,
    first_line,
    groups,
    in_open,
    nearest,
    of_hydra,
    parse,
)
from hybrid_rl.run_folder.files import Unreadable, read_yaml

PACKAGE = Path(__file__).parents[1]
# In a checkout conf/ lies beside the package; an installed wheel carries it inside.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

ConfigStore.instance().store(name="schema", node=Config)


RESUME = ("never", "auto", "must")  # resume's choices beside a run's folder


def load(overrides: Sequence[str], own: Path | None = None) -> DictConfig:
    """Compose and check one job's configuration; `own` is a user's folder of more groups. Raises ConfigError.

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
    for key, problem in _problems(config):
        value = OmegaConf.select(config, key)
        raise ConfigError(f"{key}={value} ({_origin(key, parsed, folders, run)}): {problem}")
    return config


def hydra_folders(overrides: Sequence[str], own: Path | None = None) -> tuple[str, str]:
    """Return hydra.run.dir, "" when nothing sets it, and hydra.sweep.dir. Raises ConfigError for any of Hydra's own settings."""
    parsed = parse(overrides)
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3", job_name="run"):
            config = compose("config", overrides=[*search(own), *overrides], return_hydra_config=True)
            return config.hydra.run.dir, config.hydra.sweep.dir
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(composition_problem(error, parsed)) from error


def _compose(parsed: Sequence[Override], own: Path | None, base: str = "config") -> DictConfig:
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        check_open_names(
            parsed, compose(base, overrides=[*search(own), *(str(p.input_line) for p in parsed if not in_open(p))])
        )
        return compose(base, overrides=[*search(own), *(str(p.input_line) for p in parsed)])


def search(own: Path | None) -> list[str]:
    """Return the override by which Hydra finds a user's groups too."""
    return [f"hydra.searchpath=[file://{own.resolve()}]"] if own else []


def _resumed_folder(parsed: Sequence[Override]) -> Path | None:
    """Return the folder that `resume` names, if it names one. Raises ConfigError when that is no run's folder."""
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
        if not str(value) or not os.path.isdir(folder):  # a folder without its settings is told of with them
            raise ConfigError(f"resume={value} (command line): must be never, auto, must, or the folder of a run")
    return folder


def _compose_saved(run: Path, parsed: Sequence[Override], own: Path | None) -> DictConfig:
    """Return the settings of a run's folder with overrides on top: keys as they are, groups by the section that they compose here."""
    chosen = [p for p in parsed if p.key_or_group in groups([CONF, *([own] if own else [])])]
    try:
        saved = read_yaml(run / "config.yaml")
    except Unreadable as error:
        raise ConfigError(f"{error}; resume=never for a new run") from error
    _check_targets(saved, run, {str(p.value()) for p in parsed if p.key_or_group.endswith("_target_")})
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


def _check_targets(saved: Any, run: Path, named: set[str]) -> None:
    """Raise ConfigError for a saved `_target_` that is no function of a recipe: a run's folder may come from elsewhere, and what it names is called.

    Taken is what hybrid_rl and the user's own files define, and what the command line names too.
    """
    if isinstance(saved, list):
        for child in saved:
            _check_targets(child, run, named)
    elif isinstance(saved, dict):
        for key, value in saved.items():
            if key != "_target_":
                _check_targets(value, run, named)
            elif not isinstance(value, str) or not (value in named or _of_a_recipe(value)):
                raise ConfigError(
                    f"{run / 'config.yaml'}: _target_={value} is not defined by hybrid_rl's parts or a file of yours; name it on the command line"
                )


def _of_a_recipe(target: str) -> bool:
    """Whether a function or class is defined (not only imported) in hybrid_rl's parts, or in a Python file that is not an installed package's."""
    module, _, name = target.rpartition(".")
    if module.startswith("hybrid_rl.") and not module.startswith(
        tuple(f"hybrid_rl.{part}" for part in ("algo.", "data.", "recipes.", "sandbox."))
    ):
        return False
    source = file_of(target)
    if source_of(module) is None:
        module, _, name = module.rpartition(".")  # of a class
    if source is None:  # told where targets are checked
        return not importlib.util.find_spec(target.partition(".")[0])
    installed = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    if not module.startswith("hybrid_rl.") and any(
        source.resolve().is_relative_to(Path(path).resolve()) for path in installed
    ):
        return False
    if source.suffix != ".py":
        return False
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # told where targets are checked
        return True
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in tree.body)


def _origin(key: str, overrides: Sequence[Override], folders: Sequence[Path], run: Path | None = None) -> str:
    """Where the value came from: the command line, the run that is resumed, the YAML file that sets it last, or the default in config.py."""
    if any(o.key_or_group in (key, key.replace(".", "/")) for o in overrides):
        return "command line"
    if run:
        return str(run / "config.yaml")
    chosen = {"model": "tiny", "algo": "grpo"} | {o.key_or_group: str(o.value()) for o in overrides}
    for file in (folder / "algo" / f"{chosen['algo']}.yaml" for folder in folders):
        if file.is_file():  # the parts that an algorithm names, where the command line names no other
            named = OmegaConf.to_container(OmegaConf.load(file)).get("defaults", [])  # type: ignore[union-attr]
            chosen = {
                f"algo/{name}": choice for part in named if isinstance(part, dict) for name, choice in part.items()
            } | chosen
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
    elif c.name in (".", "..") or Path(c.name).name != c.name:
        yield "name", "must be a plain name: the runs' folder is called so"
    if not c.output_dir:
        yield "output_dir", "must be a folder; output_dir=. is the current one"
    for key, least in LEAST.items():
        most = MOST.get(key, 2**31 - 1)
        if (value := OmegaConf.select(c, key)) is not None and not least <= value <= most:
            yield key, f"must be at least {least}" if value < least else f"must be at most {most}"
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
            (d for d in range(min(2, r.batch_size), r.batch_size + 1) if r.batch_size % d == 0),
            key=lambda d: abs(d - r.group_size),
        )
        yield (
            "rollout.group_size",
            f"does not divide rollout.batch_size={r.batch_size}; the nearest that does is {fitting}",
        )
    elif (r.batch_size // r.group_size) % c.algo.minibatches:
        groups = r.batch_size // r.group_size
        fitting = min((d for d in range(1, groups + 1) if groups % d == 0), key=lambda d: abs(d - c.algo.minibatches))
        yield (
            "algo.minibatches",
            f"does not divide the {groups} groups of a batch (whole groups stay together); the nearest that does is {fitting}",
        )
    room = c.policy.row_tokens - r.max_prompt_tokens
    if r.max_tokens > room:
        fix = (
            f"at most {room} fit"
            if room > 0
            else f"set policy.row_tokens to {r.max_prompt_tokens + r.max_tokens} or more"
        )
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
        yield "policy.lora.rank", "adapters need peft, which is not installed; pip install -e '.[lora]'"
    if c.policy.lora.rank > 0 and not c.policy.lora.targets:
        yield "policy.lora.targets", "names no module; all-linear means all of them"
    if c.algo.reference == Reference.base and c.policy.lora.rank == 0:
        yield (
            "algo.reference",
            "is the policy without its adapters, and policy.lora.rank=0 means it has none; use frozen",
        )
    yield from _algo_problems(c)
    if c.device not in ("auto", "cpu", "cuda"):
        yield "device", f"{nearest(c.device, ['auto', 'cpu', 'cuda'])}"
    if c.rl.keep_best and not c.rl.eval_every:
        yield (
            "rl.keep_best",
            "compares evaluations, and rl.eval_every=0 means there are none between steps; set rl.eval_every",
        )
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
            yield (
                "data.template_arguments",
                "must be a mapping of the chat template's variables, like {enable_thinking: false}",
            )
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
    elif (
        algo.kl.coef and algo.kl.place == KlPlace.loss and algo.kl.estimator == KlEstimator.k1 and not unbiased_kl(algo)
    ):
        yield (
            "algo.kl.estimator",
            "as a loss has no gradient on average; use k2 or k3, algo.kl.unbiased=true, or algo.kl.place=reward",
        )
    elif algo.kl.unbiased and algo.kl.place == KlPlace.reward:
        yield (
            "algo.kl.unbiased",
            "is of a KL in the loss, and algo.kl.place=reward puts it into the reward; leave it out",
        )
    elif algo.kl.target and not algo.kl.coef:
        yield "algo.kl.target", "steers algo.kl.coef, which is 0 and would stay 0; begin with algo.kl.coef=0.01, say"
    if algo.correction and algo.old_logprobs != OldLogprobs.recomputed:
        yield (
            "algo.correction",
            "compares the trainer's log-probabilities with the engine's; set algo.old_logprobs=recomputed",
        )
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


# what a function that a recipe names is called with, before what its own settings add
CALLED_WITH = {
    "data": (),
    "reward": ("completion", "task"),
    "algo.loss": ("tokens",),
    "algo.aggregation": ("kept", "rollout", "max_tokens"),
    "algo.selection": ("minibatch",),
}
NAMED_PARTS = ("correction", "selection")  # any number of each, by name
LEAST = {
    "rollout.batch_size": 1, "rollout.group_size": 1, "rollout.max_tokens": 1, "rollout.max_prompt_tokens": 1,
    "rollout.top_k": 0, "rollout.max_replacements": 0, "rollout.reward_workers": 1, "engine.slots": 1, "engine.tensor_parallel": 1,
    "engine.restarts": 0, "policy.row_tokens": 2,
    "policy.max_bad_steps": 1, "policy.shard": 0, "policy.lora.rank": 0, "policy.lora.alpha": 1, "handover.bucket_mib": 1,
    "sft.steps": 0, "sft.batch_size": 1, "sft.checkpoint_every": 0, "rl.steps": 0, "algo.minibatches": 1, "algo.epochs": 1,
    "algo.kl.horizon": 1, "algo.critic.warmup_steps": 0, "algo.critic.optimizer.warmup_steps": 0,
    "rl.checkpoint_every": 1, "rl.keep_checkpoints": 1, "rl.eval_every": 0, "rl.max_empty_steps": 0, "rollout.keep_steps": 0, "eval.temperature": 0, "eval.samples": 1,
    "eval.max_tasks": 0, "threads": 0, "ranks": 0, "seed": 0, "data_seed": 0, "sft.optimizer.warmup_steps": 0, "rl.optimizer.warmup_steps": 0,
    "sft.optimizer.weight_decay": 0, "rl.optimizer.weight_decay": 0, "model.tiny.layers": 1, "model.tiny.heads": 1,
    "model.tiny.kv_heads": 1, "model.tiny.hidden_size": 1, "model.tiny.head_dim": 2, "model.tiny.intermediate_size": 1,
}  # fmt: skip
MOST = {"seed": 2**63 - 1, "data_seed": 2**63 - 1}  # of the whole numbers above; the others' is 2**31 - 1
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


FUNCTION = "must be the path of a function: module.function"


def _target_problem(node: Any, called_with: tuple[str, ...]) -> tuple[str, str] | None:
    """Check a `_target_` and its arguments against the function's source, without importing it (it may import torch)."""
    if not node or not isinstance(node, dict) or not node.get("_target_"):
        return "_target_", "names no function; the recipe must set it"
    if not isinstance(node["_target_"], str) or "." not in node["_target_"].strip("."):
        return "_target_", FUNCTION
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
        return "_target_", f"{module} defines no {name!r}; {nearest(name, public)}"
    if isinstance(found, ast.ClassDef):
        found = next((n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if found is None or found.decorator_list:  # a decorator may change what it takes
        return None
    positional = [a.arg for a in (*found.args.posonlyargs, *found.args.args) if a.arg != "self"]
    named = [a.arg for a in found.args.kwonlyargs]
    accepted = positional + named
    for argument in node:
        if argument not in accepted and not argument.startswith("_") and not found.args.kwarg:
            return argument, f"{module}.{name} takes no such argument; {nearest(argument, accepted)}"
    for argument, choices in _choices(found).items():
        if argument in node and node[argument] not in choices:
            return argument, f"{module}.{name} knows {', '.join(map(repr, choices))}"
    if len(positional) < len(called_with) and not found.args.vararg:
        return (
            "_target_",
            f"{module}.{name} is called with ({', '.join(called_with)}) and takes {len(positional)} arguments",
        )
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
            case ast.alias(name=imported, asname=alias) if (
                name == (alias or imported.partition(".")[0]) or imported == "*"
            ):
                return True
            case ast.Name(id=bound, ctx=ast.Store()) if bound == name:
                return True
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound) if (
                bound == name
            ):
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


def file_of(target: str) -> Path | None:
    """Return the file of the module that a `_target_` is in: one of its functions, or one of a class of its own."""
    module = target.rpartition(".")[0]
    return source_of(module) or source_of(module.rpartition(".")[0])
