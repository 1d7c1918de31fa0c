"""Reinforcement learning of language models where one process group samples and trains on the same devices.

From Python: `run = hybrid_rl.train("reverse", ["rl.steps=40"])`; `hybrid_rl.Run("outputs/reverse/<run>")` opens an
earlier one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_rl.api import Run, RunError, train

from pathlib import Path

__version__ = "0.1.0"
__all__ = ["Run", "RunError", "train"]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: `import hybrid_rl` stays cheap."""
    if name in __all__:
        from hybrid_rl import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# in a checkout that is not installed, conf/ and recipes/ lie beside the package and not inside it
if not (Path(__file__).parent / "recipes").exists():
    __path__.append(str(Path(__file__).parents[1]))
