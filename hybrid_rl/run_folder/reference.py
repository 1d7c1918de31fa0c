"""The frozen reference of a run, kept as a checkpoint without moments, so that a resumed run measures from the same
model."""

from __future__ import annotations

from pathlib import Path

from hybrid_rl.policy.model import Policy
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.checkpoint import CheckpointError


def save_reference(folder: Path, timeout: float | None, model: Policy) -> None:
    """Write the reference of the run in `folder`. Raises CheckpointError. Collective."""
    checkpoint.begin(_root(folder), "rl", 0, model, None, {}).publish(keep=1, timeout=timeout)


def restore_reference(folder: Path, model: Policy) -> None:
    """Bring back the weights of the reference of the run in `folder`. Raises CheckpointError if there is none.
    Collective."""
    saved = model.ranks.from_main(lambda: checkpoint.latest(_root(folder)))
    if saved is None:
        raise CheckpointError(
            f"algo.reference=frozen: {_root(folder)} holds no complete reference; it was written when RL began"
        )
    saved.restore_policy(model)


def _root(folder: Path) -> Path:
    return folder / "checkpoints" / "reference"
