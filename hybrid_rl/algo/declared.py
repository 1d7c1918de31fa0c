"""Read what the file of a part states about it (see batch.py) from its source: importing it would load torch."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NEEDED = {
    "values": "a critic's value of each token's state, in Scored.values; the advantage then returns "
    "(advantages, targets)",
    "greedy": "the reward of the task's greedy completion, in Scored.greedy",
    "teacher_logprobs": "log-probabilities of algo.teacher, in Scored.teacher_logprobs",
    "group": "two or more rollouts of a task, which are compared with each other",
    "silent": "groups of equal rewards, which give it a signal",
    "parts": "groups of equal rewards with unequal parts, which give it a signal",
    "rollout_advantages": "of a loss: the same advantage at all tokens of a rollout",
}


class PartError(ValueError):
    """Raised for a part that cannot work; the message names it and the problem in one line."""


def source_of(module: str) -> Path | None:
    """Return the file of an importable module, without importing it; None if there is none."""
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):  # ValueError: __main__ of a script
        return None
    return Path(spec.origin) if spec and spec.origin else None


def nested(part: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a part and those in its arguments, each with its key."""
    if isinstance(part, Mapping):
        if isinstance(part.get("_target_"), str):  # other values are reported by the check of targets
            yield key, part
        for name, value in part.items():
            yield from nested(value, f"{key}.{name}")


def needs(part: Any) -> set[str]:
    """Return what a part and those in its arguments need: names from NEEDED."""
    return {name for _, own in nested(part) for name in _literal(_tree(own["_target_"]), "NEEDS", ())}


def removed_signal(advantage: Mapping[str, Any], silent_by: str) -> str | None:
    """Return a warning if the advantage's signal lies in groups that algo.silent_by replaces, otherwise None."""
    wanted = needs(advantage)
    if "silent" in wanted and silent_by != "none":
        return (
            f"algo.silent_by={silent_by} replaces groups of equal rewards, which give {advantage['_target_']} "
            "a signal; use algo.silent_by=none"
        )
    if "parts" in wanted and silent_by not in ("none", "parts"):
        return (
            f"algo.silent_by={silent_by} replaces groups whose rewards are equal and their parts are not, which give "
            f"{advantage['_target_']} a signal; use algo.silent_by=parts"
        )
    return None


def problems(key: str, part: Any, run: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong and what would be right) for the part at `key` and those in its arguments.

    `run` is the whole configuration.
    """
    for place, own in nested(part, key):
        module, _, name = own["_target_"].rpartition(".")
        tree = _tree(own["_target_"])
        function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
        if function is None:
            continue
        try:
            unknown = set(_literal(tree, "NEEDS", ())) - set(NEEDED)
            bounds = _literal(tree, "BOUNDS", {})
        except (ValueError, TypeError):
            yield (
                place,
                f"NEEDS and BOUNDS of {module} must be written out, like NEEDS = ('group',); they are read without "
                "running the file",
            )
            return
        if unknown:
            yield place, f"NEEDS of {module} names {', '.join(sorted(unknown))}; there are: {', '.join(NEEDED)}"
        arguments, found = _defaults(function) | dict(own), False
        for argument, problem in [*_wrong_types(function, own), *_out_of_bounds(bounds, arguments)]:
            found = True
            yield f"{place}.{argument}", problem
        if not found:
            for argument, problem in _refusals(tree, module, arguments, run):
                yield (f"{place}.{argument}" if argument in arguments else argument or place), problem


def _tree(target: str) -> ast.Module:
    """Return the syntax tree of a function's file; empty for an unreadable one, which the check of targets reports."""
    source = source_of(target.rpartition(".")[0])
    try:
        return (
            ast.parse(source.read_text(encoding="utf-8")) if source and source.suffix == ".py" else ast.Module([], [])
        )
    except (SyntaxError, UnicodeDecodeError):
        return ast.Module([], [])


def _literal(tree: ast.Module, name: str, default: Any) -> Any:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.expr() as value) if found == name:
                return ast.literal_eval(value)
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                return ast.literal_eval(value)
    return default


def _defaults(function: ast.FunctionDef) -> dict[str, Any]:
    """Return the defaults that are literals, by argument."""
    given = function.args
    pairs = list(zip(given.args[len(given.args) - len(given.defaults) :], given.defaults, strict=True))
    pairs += [(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None]
    defaults = {}
    for argument, default in pairs:
        try:
            defaults[argument.arg] = ast.literal_eval(default)
        except ValueError:
            continue
    return defaults


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


TYPES = {
    "float": (_number, "a number"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "an integer"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
}


def _wrong_types(function: ast.FunctionDef, own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield arguments that contradict an annotation of float, int or bool, or of one of these or None."""
    for argument in [*function.args.args, *function.args.kwonlyargs]:
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        fits, kind = TYPES.get(annotation.removesuffix(" | None"), (None, ""))
        value = own.get(argument.arg)
        null = value is None and annotation.endswith(" | None")
        if argument.arg in own and fits and not null and not fits(value):
            yield argument.arg, f"must be {kind}" + (" or null" if annotation.endswith(" | None") else "")


def _out_of_bounds(
    bounds: Mapping[str, Sequence[float | None]], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for name, (low, high) in bounds.items():
        value = arguments.get(name)
        if not isinstance(value, int | float):
            continue
        if not (-math.inf if low is None else low) <= value <= (math.inf if high is None else high):
            ends = [f"{word} {end:g}" for word, end in (("at least", low), ("at most", high)) if end is not None]
            yield name, f"must be {' and '.join(ends)}"


def _refusals(tree: ast.Module, module: str, arguments: Mapping[str, Any], run: Any) -> Sequence[tuple[str, str]]:
    """Return what the file's `refuses` yields; it runs without the rest of its file."""
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "refuses"), None)
    if function is None:
        return []
    scope: dict[str, Any] = {}
    only = ast.Module([function], type_ignores=[])
    try:
        # The run imports this file anyway. This module's `annotations` import holds for the compiled code too, so that
        # no annotation of the function is evaluated.
        exec(compile(only, module, "exec"), scope)  # noqa: S102
        return list(scope["refuses"](dict(arguments), run) or ())
    except Exception as error:
        return [
            (
                "",
                f"refuses(own, run) of {module} raised {type(error).__name__}: {error}; it may use its two arguments "
                "and builtins alone",
            )
        ]
