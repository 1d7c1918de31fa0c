"""Modules of which only names are imported on a CPU: every attribute and submodule is a class that does nothing."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Nothing(type):
    """Attributes and subscripts give more of the same; a call gives back a lone function, so that it serves as a decorator."""

    def __getattr__(cls, name: str) -> type:
        if (
            name.startswith("__") or name == "get_current_target"
        ):  # SGLang takes its absence for a machine without a GPU
            raise AttributeError(name)
        return _named(name)

    def __getitem__(cls, item: object) -> type:
        return cls

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return cls


def _named(name: str) -> type:
    return Nothing(name, (Exception,) if name.endswith(("Error", "Resources")) else (), {})


def attribute(name: str) -> type:
    """The module-level __getattr__ of a placeholder."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _named(name)


class _Submodules(MetaPathFinder, Loader):
    def __init__(self, package: str):
        self.prefix = f"{package}."

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self.prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = attribute  # type: ignore[method-assign]


def submodules(package: str) -> None:
    sys.meta_path.append(_Submodules(package))
