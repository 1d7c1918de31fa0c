"""Decide whether a run may go on in a folder, and from where: a resumed run has the settings and data that it began
with.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from hybrid_rl.config import Config
from hybrid_rl.data import TaskSets
from hybrid_rl.machine import versions
from hybrid_rl.preflight.targets import file_of
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.checkpoint import Checkpoint, CheckpointError
from hybrid_rl.run_folder.files import Unreadable, read_yaml

# what a run leaves in its folder
USED = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "rollouts", "base_model", "final")
# the settings that a resumed run may have otherwise; one that ends with a dot stands for all below it
MAY_CHANGE = (
    "rl.steps:",
    "rl.checkpoint_every:",
    "rl.keep_checkpoints:",
    "rl.keep_best:",
    "rl.eval_every:",
    "rl.max_empty_steps:",
    "rollout.keep_steps:",
    "sft.checkpoint_every:",
    "checkpoint.",
    "export.",
    "tracker.",
    "sweep.",
    "ranks:",
    "rank_timeout:",
    "rollout.max_reward_failures:",
    "stop_timeout:",
    "rollout.reward_start_timeout:",
    "policy.shard:",
    "policy.offload:",
    "policy.activation_checkpointing:",
    "handover.",
    "engine.timeout:",
    "engine.start_timeout:",
    "engine.restarts:",
    "engine.memory_fraction:",
    "engine.tensor_parallel:",
)
OF_A_START = ("resume:", "output_dir:", "dry_run:", "console:")  # and those that are no settings of the run itself


def changed_settings(config: Config, folder: Path) -> list[str]:
    """Return what differs from the settings that the run in `folder` was started with, as "key: before → now".

    Raises CheckpointError, which names what may change, if anything else differs.
    """
    try:
        saved = _flat(read_yaml(folder / "config.yaml"))
    except Unreadable as error:
        raise CheckpointError(f"{error}; resume=never for a new run") from error
    now = _flat(yaml.safe_load(OmegaConf.to_yaml(OmegaConf.structured(config))))
    changed = [
        f"{key}: {saved.get(key)} → {now.get(key)}"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]
    if refused := [change for change in changed if not change.startswith((*MAY_CHANGE, *OF_A_START))]:
        may = ", ".join(key.rstrip(":") + "*" * key.endswith(".") for key in MAY_CHANGE)
        raise CheckpointError(
            f"{folder} was started with other settings ({'; '.join(refused)}); use those, or resume=never for a new run; "
            f"a resumed run may change only {may}"
        )
    return changed


def resume_point(config: Config, folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint from which the run may go on, None for a new run, and what a reader should know about that.

    Raises CheckpointError for a used folder that `resume` does not name, for changed settings, and when there was a checkpoint and is none
    now: nothing is mixed, and nothing begins again silently.
    """
    if config.resume == "never":
        if used := [name for name in USED if (folder / name).exists()]:
            raise CheckpointError(
                f"{folder} holds a run already ({', '.join(used)}); choose another folder, or resume={folder} to go on with it"
            )
        return None, []
    root = folder / "checkpoints"
    found, broken = checkpoint.latest(root), checkpoint.incomplete(root)
    lines = _lines(folder / "metrics.jsonl")
    if found is None:
        trained = any(line.startswith(b'{"stage": "rl"') for line in lines)  # RL begins with a checkpoint
        if config.resume != "auto" or broken or trained:
            which = f" ({', '.join(f.name for f in broken)}: without {checkpoint.MARKER})" if broken else ""
            raise CheckpointError(
                f"resume={config.resume}: there is no complete checkpoint in {root}{which}; resume=never for a new run"
            )
        if any((folder / name).exists() for name in USED):
            return None, [f"{folder} was ended before its first checkpoint; it begins again"]
        return None, [f"resume=auto: no unfinished run of {config.name} to go on with; this is a new one"]
    if found.state["stage"] == "rl" and found.state["step"] > config.rl.steps:
        raise CheckpointError(
            f"{found.folder} is past rl.steps={config.rl.steps}; raise rl.steps, or resume=never for a new run"
        )
    changed = changed_settings(config, folder)
    _check_state(found)
    if len(lines) < (expected := found.state["metrics_lines"]):
        raise CheckpointError(
            f"{folder / 'metrics.jsonl'} has {len(lines)} lines, {found.folder.name} was saved after {expected}; resume=never for a new run"
        )
    notes = [f"changed since it was started: {change}" for change in changed if not change.startswith(OF_A_START)]
    newer = [f.name for f in broken if checkpoint.age(f) > checkpoint.age(found.folder)]
    if newer:
        notes.append(
            f"passed over {', '.join(newer)}, without {checkpoint.MARKER}: the run goes on from {found.folder.name}"
        )
    old, new = found.state["versions"], versions()
    if other := [
        f"{name} {old.get(name)} → {new.get(name)}" for name in sorted(old | new) if old.get(name) != new.get(name)
    ]:
        notes.append(
            f"other code than saved it ({', '.join(other)}): the numbers may differ from those of a run that was never ended"
        )
    return found, notes


def digests(config: Config, tasks: TaskSets) -> dict[str, str]:
    """Return what identifies a run's data: a digest of each task set, and one of the files that define reward and environment."""
    source = sha256()
    for target in sorted({*_targets(config.reward), *_targets(config.environment)}):
        file = file_of(target)
        source.update(file.read_bytes() if file and file.is_file() else target.encode())
    return {**tasks.digests(), "reward": source.hexdigest()}


def check_data(found: Checkpoint, now: Mapping[str, str]) -> list[str]:
    """Return notes on what changed beside the settings.

    Raises CheckpointError for tasks that are not those the run began with.
    """
    saved = found.state.get("data") or dict(now)  # a checkpoint from before they were kept
    if other := [name for name in ("rl", "sft", "eval") if saved.get(name) != now[name]]:
        raise CheckpointError(
            f"{found.folder}: the run began with other tasks ({', '.join(other)}: rows were changed, added, removed or moved); "
            "use those, or resume=never for a new run"
        )
    if saved.get("reward") != now["reward"]:
        return ["the reward's source changed since the run was saved: rewards before and after may not compare"]
    return []


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


KINDS: dict[str, Any] = {
    "version": int,
    "metrics_lines": int,
    "evaluations": dict,
    "best": dict | None,
    "seconds": dict,
    "versions": dict,
    "data": dict | None,
}


def _check_state(found: Checkpoint) -> None:
    """Raise CheckpointError when a value of state.json is not of its kind: the file is whole, and another program wrote it."""
    for name, kind in KINDS.items():
        value = found.state.get(name)
        numbers = value.values() if name in ("evaluations", "seconds", "best") and isinstance(value, dict) else ()
        if (
            not isinstance(value, kind)
            or (kind is int and value < 0)
            or not all(isinstance(number, int | float) for number in numbers)
        ):
            raise CheckpointError(
                f"{found.folder / 'state.json'} holds no usable {name}; {checkpoint.AGAIN % found.folder}"
            )


def _targets(node: object) -> set[str]:
    """Return every `_target_` at any depth, and what hybrid_rl's rewards and environments load by name."""
    if isinstance(node, list):
        return set().union(*map(_targets, node))
    if not isinstance(node, dict):
        return set()
    own = {str(node[key]) for key in ("_target_", "function", "make") if isinstance(node.get(key), str)}
    own |= set(map(str, node.get("functions") or ())) if isinstance(node.get("functions"), list) else set()
    return own.union(*(_targets(value) for value in node.values()))


def _flat(node: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}{name}.").items()}
