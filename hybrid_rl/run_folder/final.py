"""Export the trained model to final/ and trained adapters to final_adapter/; a killed export leaves neither half."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from hybrid_rl.policy.model import Policy
from hybrid_rl.run_folder.files import remove, sync_tree

ADAPTER = "_adapter"  # Policy.export adds it to the folder's name for the adapters


def export_final(policy: Policy, folder: Path, *, float32: bool) -> None:
    """Write the model to the run's `folder`, in full precision if `float32`, over an earlier export. Collective."""
    exported = folder / ".final"
    for left in (exported, exported.with_name(exported.name + ADAPTER)):
        policy.ranks.from_main(partial(remove, left))
    policy.export(exported, float32=float32)
    policy.ranks.from_main(lambda: _put(exported, folder / "final"))


def _put(exported: Path, final: Path) -> None:
    """Rename the finished export, and the folder of its adapters, to where they are expected."""
    for suffix in ("", ADAPTER):
        made, wanted = (folder.with_name(folder.name + suffix) for folder in (exported, final))
        if made.exists():
            sync_tree(made)
            remove(wanted)
            os.replace(made, wanted)
