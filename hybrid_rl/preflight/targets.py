"""Check the functions that settings name by `_target_` against their source, without importing them."""

from __future__ import annotations

import ast
import importlib.util
import site
import sysconfig
from pathlib import Path
from typing import Any

from hybrid_rl.algo.declared import source_of
from hybrid_rl.config import ConfigError
from hybrid_rl.preflight.names import nearest

FUNCTION = "must be the path of a function: module.function"


def target_problem(node: Any, called_with: tuple[str, ...]) -> tuple[str, str] | None:
    """Return (key, problem) of a `_target_` and its arguments, None if there is none.

    The function's source is parsed and not imported, since it may import torch. `called_with` names the positional
    arguments that hybrid_rl passes.
    """
    if not node or not isinstance(node, dict) or not node.get("_target_"):
        return "_target_", "names no function; set it in the recipe"
    if not isinstance(node["_target_"], str) or "." not in node["_target_"].strip("."):
        return "_target_", FUNCTION
    module, name = _defined(node["_target_"])
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
        if called_with and not any(getattr(n, "name", "") == "__call__" for n in found.body) and not found.bases:
            return "_target_", f"{module}.{name} is a class without __call__({', '.join(called_with)})"
        called_with = ()  # its object is called
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
    """Return whether a module may get the name from an import, an assignment or a nested block."""
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


def _defined(target: str) -> tuple[str, str]:
    """Return (module, name) of a target, with a name that a package of hybrid_rl imports followed to its definition."""
    module, _, name = target.rpartition(".")
    source = source_of(module) if module.startswith("hybrid_rl.") else None
    if source is not None and source.name == "__init__.py":
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and any(
                alias.name == name and not alias.asname for alias in node.names
            ):
                return str(node.module), name
    return module, name


def _choices(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[Any]]:
    """Return the allowed values of each argument that is annotated as Literal[...]."""
    found: dict[str, list[Any]] = {}
    for argument in (*function.args.args, *function.args.kwonlyargs):
        match argument.annotation:
            case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
                elements = choices.elts if isinstance(choices, ast.Tuple) else [choices]
                found[argument.arg] = [element.value for element in elements if isinstance(element, ast.Constant)]
    return found


def file_of(target: str) -> Path | None:
    """Return the file of the module that defines a `_target_`: a function, or a method of a class."""
    module = _defined(target)[0]
    return source_of(module) or source_of(module.rpartition(".")[0])


# ---- a saved configuration, which may come from someone else -------------------------------------------------------


def check_saved_targets(saved: Any, run: Path, named: set[str]) -> None:
    """Raise ConfigError for a saved `_target_` that could run foreign code: a run's folder may come from someone else.

    Allowed are targets that hybrid_rl's parts or the user's own files define, and those in `named`, which the command
    line names too. `saved` is the parsed config.yaml of the folder `run`.
    """
    if isinstance(saved, list):
        for child in saved:
            check_saved_targets(child, run, named)
    elif isinstance(saved, dict):
        names = {"_target_"}
        if str(saved.get("_target_")).startswith(("hybrid_rl.rewards.", "hybrid_rl.environments.")):
            names |= {"function", "functions", "make"}  # what they import by name
        for key, value in saved.items():
            if key == "functions" and key in names:
                check_saved_targets([{"_target_": each} for each in value], run, named)
            elif key not in names:
                check_saved_targets(value, run, named)
            elif not isinstance(value, str) or not (value in named or _of_a_recipe(value)):
                raise ConfigError(
                    f"{run / 'config.yaml'}: {key}={value} is not defined by hybrid_rl's parts or a file of yours; "
                    "if you trust it, name it on the command line"
                )


def _of_a_recipe(target: str) -> bool:
    """Return whether hybrid_rl's parts, or a Python file outside installed packages, define the function or class.

    A name that a file only imports does not count.
    """
    module, name = _defined(target)
    if module.startswith("hybrid_rl.") and not module.startswith(
        tuple(f"hybrid_rl.{part}" for part in ("algo.", "data.", "environments.", "recipes.", "rewards.", "sandbox."))
    ):
        return False
    source = file_of(target)
    if source_of(module) is None:
        module, _, name = module.rpartition(".")  # a method of a class
    if source is None:  # target_problem reports it
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
    except (SyntaxError, UnicodeDecodeError):  # target_problem reports it
        return True
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in tree.body)
