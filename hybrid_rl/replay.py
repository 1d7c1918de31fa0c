"""Replay a batch that a run kept because it had a non-finite number (see hybrid_rl/run_folder/bad_batch.py).

- python -m hybrid_rl.replay outputs/reverse/<run>/bad/step_000012
- all batches of a run: python -m hybrid_rl.replay outputs/reverse/<run>
- on the CPU: … --device cpu
- with a loss of your own: … --loss my_module.loss

A folder may come from someone else, so it cannot choose code to run: its loss must be one of hybrid_rl, or the one that
the command line names.

Forward and backward run in one process, for each sample alone and then for all samples in the rows of the update. The
exit code is 1 if a number is non-finite again, 0 if all are finite, 2 if there is nothing to replay.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging
from yaml import YAMLError

from hybrid_rl.algo.batch import Given
from hybrid_rl.config import Config, LayoutKind, LoraConfig
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy.critic import Critic, ValueModel
from hybrid_rl.policy.layout import sampled_tokens
from hybrid_rl.policy.model import Policy, pick_device
from hybrid_rl.policy.numbers import Fault, find
from hybrid_rl.policy.optimizer import make_optimizer
from hybrid_rl.policy.update import LOG_RATIO, Objective, demonstrate, forward_backward, score
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.rollouts import as_rollout, read_rollouts
from hybrid_rl.types import Rollout


def check_loss(loss: Any, own: str, file: Path) -> None:
    """Raise CheckpointError unless `loss` is one of hybrid_rl.algo or `own`, and its arguments call no function."""
    target = loss.get("_target_") if isinstance(loss, dict) else None
    if not isinstance(target, str) or (target != own and not is_own(target)):
        raise CheckpointError(
            f"{file}: algo.loss={target} is not a loss of hybrid_rl; "
            f"if it is yours and you trust it, add --loss {target}"
        )
    arguments = [value for key, value in loss.items() if key != "_target_"] + [
        {key: 0} for key in loss if key != "_target_"
    ]
    while arguments:
        value = arguments.pop()
        if isinstance(value, dict):
            if named := next((key for key in value if str(key).startswith("_")), None):
                raise CheckpointError(
                    f"{file}: algo.loss has an argument with {named}, but a loss of a kept batch "
                    "may call no function; remove it"
                )
            arguments += value.values()
        elif isinstance(value, list):
            arguments += value


def is_own(target: str) -> bool:
    """Return whether a file of hybrid_rl.algo defines `target`; a name that it only imports does not count."""
    module, _, name = target.rpartition(".")
    if not re.fullmatch(r"hybrid_rl\.algo\.[a-z0-9_]+", module) or importlib.util.find_spec(module) is None:
        return False
    return getattr(getattr(importlib.import_module(module), name, None), "__module__", None) == module


@dataclass(slots=True)
class Kept:
    """A kept batch: its model, rollouts and the columns of numbers that the update was given."""

    folder: Path
    facts: dict[str, Any]
    config: Config
    model: Policy
    rollouts: list[Rollout]
    columns: dict[str, Tensor]

    @classmethod
    def load(cls, folder: Path, device: torch.device, own_loss: str = "") -> Kept:
        """Return the batch in `folder`, with its model on `device`.

        Raises CheckpointError, ModelError or OSError if something is missing or damaged, or names a loss that is not
        allowed.
        """
        try:
            return cls._load(folder, device, own_loss)
        except (CheckpointError, ModelError):
            raise
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            RecursionError,
            OmegaConfBaseException,
            YAMLError,
        ) as error:
            raise CheckpointError(
                f"{folder} is damaged: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            ) from error

    @classmethod
    def _load(cls, folder: Path, device: torch.device, own_loss: str) -> Kept:
        facts = json.loads((folder / "batch.json").read_text())
        schema = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(folder / "config.yaml"))
        config = cast(Config, OmegaConf.to_object(schema))
        check_loss(config.algo.loss, own_loss, folder / "config.yaml")  # before anything else of the folder is used
        config.policy.shard, config.policy.layout = 0, LayoutKind(facts["layout"])  # there is one process here
        rows = read_rollouts(folder / "rollouts.parquet")
        columns = load_file(folder / "numbers.safetensors")  # the order of the columns has no meaning
        kind = ValueModel if facts["kind"] == "critic" else Policy
        if kind is ValueModel:
            config.policy.lora = LoraConfig()
        model = kind.load(folder.parents[1] / facts["model"], device, config.policy)
        weights = checkpoint.latest(folder)
        if weights is None:
            raise CheckpointError(f"{folder} holds no complete weights")
        weights.restore_policy(model)
        return cls(
            folder,
            facts,
            config,
            model,
            [as_rollout(rows[i]) for i in facts["chosen"]],
            {n: columns[n].to(device) for n in facts["columns"]},
        )

    def run(self, members: Sequence[int]) -> tuple[dict[str, Tensor], float]:
        """Run forward and backward on some rollouts; return their tokens' numbers by name, and the gradient norm."""
        rollouts = [self.rollouts[i] for i in members]
        scale, temperature = self.facts["scale"], self.config.rollout.temperature
        if self.facts["kind"] == "sft":
            found = {"loss": demonstrate(self.model, scale, rollouts, self.config.sft.label_smoothing)}
        elif self.facts["kind"] == "scored":
            return {"log-probability": score(self.model, rollouts, temperature)}, 0.0
        else:
            given, chosen = self._given(members)
            if isinstance(self.model, ValueModel):
                critic = Critic(
                    self.model,
                    make_optimizer(self.model, self.config.algo.critic.optimizer, 1),
                    self.config.algo.critic.clip,
                )
                critic.optimizer.scale = scale
                values, targets = (self.columns[name][chosen] for name in ("values", "targets"))
                losses = critic.forward_backward(rollouts, values, targets, given).losses
                found = {"value": critic.values(rollouts), "value loss": losses}
            else:
                objective = Objective.of(self.config.algo, self.facts["kl_coef"])
                done = forward_backward(self.model, scale, rollouts, given, objective, temperature)
                found = {"log-probability": done.columns[LOG_RATIO] + given.old_logprobs, "loss": done.losses}
        return found, self._norm() / scale

    def _given(self, members: Sequence[int]) -> tuple[Given, Tensor]:
        """Return the inputs of the update for some rollouts, and a mask of their sampled tokens."""
        of = sampled_tokens(self.rollouts, self.model.device).rollout_index
        chosen = torch.isin(of, torch.tensor(list(members), device=of.device))
        names = ("advantages", "old_logprobs", "behaviour_logprobs", "corrections", "weights", "ref_logprobs", "look")
        columns: dict[str, Any] = {name: self.columns[name][chosen] for name in names if name in self.columns}
        return Given(rollout=of[chosen], divisor=self.facts["divisor"], **columns), chosen

    def _norm(self) -> float:
        """Return the norm of the gradient; infinite or NaN if any entry is."""
        norm = nn.utils.get_total_norm([p.grad for p in self.model.trainable.values() if p.grad is not None])
        return float(getattr(norm, "full_tensor", lambda: norm)())

    def clear(self) -> None:
        """Remove all gradients."""
        for parameter in self.model.trainable.values():
            parameter.grad = None


def replay(folder: Path, device: torch.device, own_loss: str = "") -> bool:
    """Print the numbers of each sample and the first non-finite one; return whether there is one."""
    kept = Kept.load(folder, device, own_loss)
    facts, rollouts = kept.facts, kept.rollouts
    said = Fault(**{**facts["fault"], "value": float(facts["fault"]["value"])})
    stage = "SFT " if facts["kind"] == "sft" else ""
    print(f"{folder}: {stage}step {facts['step']}, version {facts['version']}, {len(rollouts)} rollouts")
    print(f"recorded: {said}")
    first = find(kept.columns, rollouts)
    print(f"given:    {first or 'every number is finite'}")
    print(f"\n{'task':<16} {'group':>6} {'rollout':>7} {'tokens':>6} {'reward':>9}  computed here, alone")
    alone: Fault | None = None
    for i, r in enumerate(rollouts):
        found, norm = kept.run([i])
        kept.clear()
        fault = find(found, [r]) or (
            None if math.isfinite(norm) else Fault("gradient", norm, r.task_id, r.group_id, r.index)
        )
        alone = alone or fault
        numbers = "  ".join(f"{name} {_range(column)}" for name, column in found.items()) + f"  gradient {norm:.3g}"
        reward = "–" if r.reward is None else f"{r.reward:.4g}"
        print(
            f"{r.task_id:<16} {r.group_id:>6} {r.index:>7} {r.sampled:>6} {reward:>9}  {numbers}"
            + (f"  ! {fault}" if fault else "")
        )
    found, norm = kept.run(range(len(rollouts)))
    together = find(found, rollouts) or (None if math.isfinite(norm) else Fault("gradient", norm))
    loss = sum(float(c.sum()) for n, c in found.items() if "loss" in n)
    print(f"\nall together, in the update's rows: loss {loss:.4g}, gradient {norm:.4g}")
    for name, parameter in kept.model.trainable.items():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            print(f"first parameter with a non-finite gradient: {name}")
            break
    kept.clear()
    first = first or alone or together
    print(
        f"first:    {first}"
        if first
        else "every number is finite here; the run may have used another device or number of ranks"
    )
    return first is not None


def _range(column: Tensor) -> str:
    """Return the smallest and the largest number as text; NaN if there is one."""
    return f"{float(column.min()):.4g}…{float(column.max()):.4g}" if len(column) else "–"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_rl.replay", description="Compute a kept batch again and name the non-finite numbers."
    )
    parser.add_argument("path", type=Path, help="a folder of bad/, a file in it, or a run's folder")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--loss", default="", metavar="TARGET", help="a loss of your own that the run's config.yaml may name"
    )
    chosen = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = chosen.path.parent if chosen.path.is_file() else chosen.path
    folders = sorted(
        found.parent for pattern in ("batch.json", "*/batch.json", "bad/*/batch.json") for found in path.glob(pattern)
    )
    if not folders:
        print(
            f"hybrid_rl: {chosen.path} holds no kept batch; name the folder of a run, or a folder in its bad/",
            file=sys.stderr,
        )
        return 2
    try:
        device = pick_device(chosen.device)
        found = [replay(folder, device, chosen.loss) for folder in folders]
    except (CheckpointError, ModelError, OSError) as error:
        print(f"hybrid_rl: {error}", file=sys.stderr)
        return 2
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
