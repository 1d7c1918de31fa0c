"""Check the values of settings against the bounds in config.py, and against each other."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_rl.algo.declared import needs, problems
from hybrid_rl.config import (
    Config,
    EngineKind,
    KlEstimator,
    KlPlace,
    OldLogprobs,
    Reference,
    data_config,
    loader,
    unbiased_kl,
)
from hybrid_rl.engine.sglang.interface import unusable
from hybrid_rl.preflight.names import CONF, PARTS, first_line, nearest
from hybrid_rl.preflight.targets import target_problem
from hybrid_rl.run_folder import trackers

# positional arguments that hybrid_rl passes to the function that a setting names; its own settings follow as keywords
CALLED_WITH = {
    "data": (),
    "data.curriculum": ("tasks", "seed", "at_least"),
    "reward": ("completion", "task"),
    "environment": (),
    "algo.loss": ("tokens",),
    "algo.aggregation": ("kept", "rollout", "max_tokens"),
    "algo.selection": ("minibatch",),
}
NAMED_PARTS = ("correction", "selection")  # each may hold any number of parts, by name


def value_problems(c: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong and what to do) of every bad value, the most basic problems first."""
    if not c.name:
        recipes = ", ".join(sorted(file.stem for file in (CONF / "recipe").glob("*.yaml")))
        yield "name", f"no recipe was chosen; add +recipe=NAME, there are: {recipes}"
    elif c.name in (".", "..") or Path(c.name).name != c.name:
        yield "name", "must be a plain name, since the folder of its runs is named after it"
    if not c.output_dir:
        yield "output_dir", "must be a folder; output_dir=. is the current one"
    for key, field in _bounded(Config):
        if problem := _out_of_bounds(OmegaConf.select(c, key), **field.metadata):
            yield key, problem
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
            f"does not divide the {groups} groups of a batch (whole groups stay together); "
            f"the nearest that does is {fitting}",
        )
    fitting = c.policy.row_tokens - r.max_prompt_tokens
    if c.policy.row_tokens and r.max_tokens > fitting:
        needed = r.max_prompt_tokens + r.max_tokens
        fix = f"at most {fitting} fit" if fitting > 0 else f"set policy.row_tokens to {needed} or more"
        yield (
            "rollout.max_tokens",
            f"with rollout.max_prompt_tokens={r.max_prompt_tokens} a sample is longer than a row of "
            f"policy.row_tokens={c.policy.row_tokens}; {fix}",
        )
    if (
        r.oversample > 1
        and c.deterministic
        and (c.engine.kind == EngineKind.sglang or (c.engine.kind == EngineKind.auto and not unusable()))
    ):
        yield (
            "rollout.oversample",
            "lets SGLang's own clock decide which groups end, and deterministic=true wants a run that repeats itself; "
            "use engine=local, or rollout.oversample=1",
        )
    if r.oversample > 1 and c.algo.old_logprobs == OldLogprobs.recomputed and not c.algo.correction:
        yield (
            "algo.old_logprobs",
            "forgets which weights sampled the older tokens of rollout.oversample; use behaviour, or add "
            "algo/correction=tis",
        )
    if r.oversample > 1 and c.environment:
        yield (
            "rollout.oversample",
            "keeps answers from one step to the next, and environment._target_ makes conversations, which it cannot keep; "
            "use rollout.oversample=1",
        )
    if t.heads % t.kv_heads:
        yield "model.tiny.kv_heads", f"must divide model.tiny.heads={t.heads}"
    if t.head_dim % 2:
        yield "model.tiny.head_dim", f"must be even (rotary embedding); the nearest is {t.head_dim + 1}"
    if c.engine.kind == EngineKind.sglang and (why := unusable()):
        yield "engine.kind", why
    if c.engine.tensor_parallel > 1 and c.engine.kind == EngineKind.local:
        yield (
            "engine.tensor_parallel",
            "is a setting of engine=sglang; engine=local holds the whole weights on every rank, set it to 1",
        )
    elif c.ranks % c.engine.tensor_parallel:
        yield "engine.tensor_parallel", f"does not divide the {c.ranks} ranks; set ranks to a multiple of it"
    if c.policy.lora.rank > 0 and importlib.util.find_spec("peft") is None:
        yield "policy.lora.rank", "adapters need peft, which is not installed; pip install -e '.[lora]'"
    if why := trackers.missing(c.tracker.kind):
        yield "tracker.kind", why
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
    if c.eval.against is not None and (c.sft.steps or c.rl.steps):
        yield "eval.against", "is of evaluations alone: python -m hybrid_rl.evaluate … eval.against=<folder>"
    for key in ("model.path", "eval.against", "reward_model.path"):
        if (path := OmegaConf.select(c, key)) is not None and (why := _folder_problem(path)):
            yield key, why.format(key=key)
    if c.sweep.prune and not c.rl.eval_every:
        yield "sweep.prune", "compares evaluations between steps, and rl.eval_every=0 means none; set rl.eval_every"
    for key in (
        "data",
        *(["reward"] if c.reward or not c.environment else []),
        *(["environment"] if c.environment else []),
    ):
        yield from _part_problems(key, c)
    if c.environment and c.reward_model.path is not None:
        yield "reward_model.path", "scores single answers, and environment._target_ makes conversations; leave one out"


def _folder_problem(path: str) -> str:
    """Return why a path is no model folder to load, "" if it may be one."""
    if not path or not (Path(path) / "config.json").is_file():
        todo = "set {key}=/path/to/the/folder"
        if Path(path).parts[-2:] == ("hybrid_rl", "SmolLM2-135M-Instruct"):  # of preset=smollm2
            todo = "python -m hybrid_rl.model_folder.smollm2 makes it, once"
        return f"is not a Hugging Face model folder on this disk (one with a config.json); {todo}"
    if not any(Path(path).glob("*.safetensors")):
        return "has no *.safetensors file; convert its weights, which are read in that format only"
    return ""


def _part_problems(key: str, c: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield problems of the function at `key`, and those that its module states about settings."""
    node = OmegaConf.to_container(OmegaConf.select(c, key))
    if key == "reward" and isinstance(node, dict) and node and "_target_" not in node:
        yield from _reward_problems(node)
        return
    called_with = CALLED_WITH.get(key, CALLED_WITH.get(key.rpartition(".")[0], ("batch",)))
    if key == "data" and isinstance(node, dict):
        yield from _data_problems(node)
        node = loader(node)
    if problem := target_problem(node, called_with):
        yield problem[0] and f"{key}.{problem[0]}", problem[1]
    elif key == "data":
        for place, inner in _inner_targets(node, key):  # functions that return rows
            if problem := target_problem(inner, ()):
                yield f"{place}.{problem[0]}", problem[1]
    elif key.startswith("algo."):
        yield from problems(key, node, c)


def _data_problems(node: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield problems of the keys of `data` that are not its function's."""
    for name, example in (
        ("template_arguments", "{enable_thinking: false}"),
        ("weights", "{maths: 3, code: 1}"),
        ("curriculum", "{_target_: hybrid_rl.data.curriculum.pass_rate}"),
    ):
        if not isinstance(node.get(name), dict | None):
            yield f"data.{name}", f"must be a mapping, like {example}"
            return
    try:
        data = data_config(node)
    except OmegaConfBaseException as error:
        yield f"data.{str(error.full_key).partition('.')[0]}", first_line(error)
        return
    if not all(0 < weight < math.inf for weight in data.weights.values()):
        yield "data.weights", "must be numbers above 0; a source that is not to be drawn is left out of data.rl"
    if data.curriculum and (problem := target_problem(data.curriculum, CALLED_WITH["data.curriculum"])):
        yield f"data.curriculum.{problem[0]}", problem[1]


def _inner_targets(node: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (key, node) of every function that the arguments of a function name."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        key = f"{place}[{name}]" if isinstance(node, list) else f"{place}.{name}"
        if isinstance(child, dict) and "_target_" in child:
            yield key, child
        yield from _inner_targets(child, key)


def _reward_problems(parts: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield problems of a reward of named parts."""
    weights = [node.get("weight", 1.0) for node in parts.values() if isinstance(node, dict)]
    for name, node in parts.items():
        key = f"reward.{name}"
        if not isinstance(node, dict) or not node.get("_target_"):
            yield (
                key,
                "must be a part of the reward, like {_target_: module.function, weight: 1}, or reward._target_ be set",
            )
            continue
        weight, sources = node.pop("weight", 1.0), node.pop("sources", None)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            yield f"{key}.weight", "must be a number; 0: logged and not paid"
        if sources is not None and not (isinstance(sources, list) and all(isinstance(s, str) for s in sources)):
            yield f"{key}.sources", "must be a list of sources, as tasks name them"
        if problem := target_problem(node, CALLED_WITH["reward"]):
            yield f"{key}.{problem[0]}", problem[1]
    if not any(weights):
        yield "reward", "pays nothing: every weight is 0"


def _algo_problems(c: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield problems of the algorithm's settings."""
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
            "applies to a KL in the loss, and algo.kl.place=reward puts it into the reward; leave it out",
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
                "weighs tokens by whole distributions, and rollout.top_k or rollout.top_p truncates the sampled one; "
                "use rollout.top_k=0 rollout.top_p=1, or no correction"
            ),
        )
    if c.rollout.group_size == 1 and algo.silent_by != "none":
        yield "rollout.group_size", "makes every group silent; use 2 or more, or algo.silent_by=none"
    if c.rollout.group_size == 1 and "group" in needs({"_target_": algo.advantage._target_}):
        yield "rollout.group_size", f"leaves {algo.advantage._target_} nothing to compare with; use 2 or more"
    if "teacher_logprobs" in wanted and algo.teacher is None:
        yield "algo.teacher", "is missing, and algo.advantage needs it; set algo.teacher=/path/to/a/model/folder"
    elif "teacher_logprobs" not in wanted and algo.teacher is not None:
        yield "algo.teacher", "is not used by algo.advantage; use algo=opd, or leave it out"
    if algo.teacher is not None and not (Path(algo.teacher) / "config.json").is_file():
        yield "algo.teacher", "is not a Hugging Face model folder on this disk (one with a config.json)"
    if algo.critic.path is not None and not (Path(algo.critic.path) / "config.json").is_file():
        yield "algo.critic.path", "is not a Hugging Face model folder on this disk (one with a config.json)"


def _bounded(section: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Yield (key, field) of every setting that config.py gives bounds, those of nested sections included."""
    types = get_type_hints(section)
    for field in fields(section):
        if is_dataclass(types[field.name]):
            yield from _bounded(types[field.name], f"{prefix}{field.name}.")
        elif field.metadata:
            yield f"{prefix}{field.name}", field


def _out_of_bounds(value: float | None, least: float | None, most: float | None, above: float | None) -> str:
    """Return what a value must be, "" if it is within its bounds."""
    if value is None:
        return ""
    if above is not None:
        return "" if above < value < math.inf else f"must be a number above {above:g}"
    assert least is not None
    if isinstance(value, int):
        most = 2**31 - 1 if most is None else most  # the largest that torch accepts
        return f"must be at least {least}" if value < least else f"must be at most {most}" if value > most else ""
    if most is None:
        return "" if least <= value < math.inf else f"must be a number of at least {least:g}"
    return "" if least <= value <= most else f"must be between {least:g} and {most:g}"
