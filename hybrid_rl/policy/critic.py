"""The critic: a causal LM whose head gives one number a token, the return that is expected before the token is sampled
(PPO's V)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hybrid_rl.algo.batch import Given
from hybrid_rl.config import Offload
from hybrid_rl.policy import lora
from hybrid_rl.policy.layout import Layout, pack
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import alone, find, finite
from hybrid_rl.policy.offload import Parked
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.sharding import local
from hybrid_rl.processes import hangs
from hybrid_rl.types import PackedBatch, Rollout


class ValueModel(Policy):
    """Loaded, sharded and computed like a policy, all weights trained; its head is one row of zeros, so that every
    value begins as 0."""

    def _adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        old = model.get_output_embeddings().weight
        model.config.tie_word_embeddings = False
        head = nn.utils.skip_init(nn.Linear, old.shape[1], 1, bias=False, device=old.device, dtype=old.dtype)
        nn.init.zeros_(head.weight)
        model.set_output_embeddings(head)
        return model

    def values(self, row: PackedBatch) -> Tensor:
        """V, [M] float32, of the states in which the row's tokens were sampled. Half precision has too few digits for
        the product's sum."""
        return self._scored(row, lambda hidden, head, targets: linear(hidden.float(), head.weight.float()).sum(-1))

    @torch.no_grad()
    def begin_as(self, policy: Policy) -> None:
        """Take over the policy's weights, adapters merged, all but its head. Both lie in the same shards.
        Collective."""
        head = self.model.get_output_embeddings().weight
        for name, _, rows in lora.merged(policy.parameters, policy.model):
            ours = self.parameters.get(name)
            if ours is not None and ours is not head:
                local(ours).copy_(rows)

    def park(self) -> None:
        """The weights to host memory: on a GPU always, on the CPU where policy.offload says so, but not on one rank
        (see Frozen.park)."""
        wanted = self.device.type != "cpu" or (self.settings.offload == Offload.all and self.ranks.world > 1)
        if wanted and self._parked is None:
            self._parked = Parked(local(p) for p in self.parameters.values())


@dataclass(slots=True)
class Critic:
    """A value model and its optimizer, `clip` as `value_loss` has it. What is parked comes back by itself when it is
    needed."""

    model: ValueModel
    optimizer: Optimizer
    clip: float = 0.0

    @torch.no_grad()
    def values(self, rollouts: Sequence[Rollout], layout: Layout, row_tokens: int) -> Tensor:
        """V of all N sampled tokens, [N] float32, in rollout order; the same on every rank. Collective."""
        self.unpark()
        model = self.model
        values = torch.zeros(sum(r.sampled for r in rollouts), device=model.device)
        for row in pack(rollouts, layout, row_tokens, model.ranks):
            row = row.to(model.device)
            values[row.token_index] = model.values(row)
            hangs.progress()
        model.reshard()
        return model.ranks.sum(values)

    def update(
        self, rollouts: Sequence[Rollout], values: Tensor, targets: Tensor, given: Given, layout: Layout, row_tokens: int
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer step towards `targets` [N], away from `values` [N], the predictions that the targets were made
        with.

        `given` weights tokens as it does in the policy's loss; nothing depends on rows or ranks. Skipped, and
        `optimizer.fault` set, where a number is not finite. Collective: every rank is given the whole batch, and all
        return the same numbers.
        """
        losses, clips = self.accumulate(rollouts, values, targets, given, layout, row_tokens)
        fault = None if finite([losses]) else find({"value loss": losses}, rollouts)
        if fault:
            fault = alone(fault, lambda r: self.values(r, layout, row_tokens), rollouts)
        result = self.optimizer.skip(fault) if fault else self.optimizer.step()
        return {
            "value_loss": float(losses.sum()) / given.divisor,
            "value_clip": clips / max(1, len(values)),
            "value_grad_norm": result.grad_norm,
            "skipped": float(result.skipped),
        }

    def accumulate(
        self,
        rollouts: Sequence[Rollout],
        values: Tensor,
        targets: Tensor,
        given: Given,
        layout: Layout,
        row_tokens: int,
    ) -> tuple[Tensor, float]:
        """Forward and backward over all rows; returns the weighted loss of every token, [N] float32, and how many were
        clipped. Collective."""
        self.unpark()
        model = self.model
        token_losses, clips = torch.zeros(len(values), device=model.device), torch.zeros((), device=model.device)
        for row in pack(rollouts, layout, row_tokens, model.ranks):
            row = row.to(model.device)
            at = row.token_index
            losses, clipped = value_loss(model.values(row), values[at], targets[at], self.clip)
            losses = given.weights[at] * losses
            (losses.sum() * (self.optimizer.scale / given.divisor)).backward()
            token_losses[at] = losses.detach()
            clips += clipped.float().sum()
            hangs.progress()
        return model.ranks.sum(token_losses), float(model.ranks.sum(clips))

    def park(self) -> None:
        """Weights and moments to host memory, while the engine samples."""
        self.model.park()
        self.optimizer.park()

    def unpark(self) -> None:
        self.model.unpark()
        self.optimizer.unpark()


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (clamp(V, V_old ± clip) − R)²), and whether the clamp keeps the token from having a gradient; [M]
    each.

    PPO2's (github.com/openai/baselines, ppo2/model.py): a step stops counting once it has moved V by `clip` towards R.
    0: ½ (V − R)². V_old = 0, clip = 0.2, R = 1: V = 0.1 → 0.405; V = 0.5 → 0.32, clipped; V = −0.5 → 1.125, not
    clipped, for it moved away.
    """
    losses = (values - targets).square()
    if not clip:
        return 0.5 * losses, torch.zeros_like(losses, dtype=torch.bool)
    held = (values.clamp(old - clip, old + clip) - targets).square()  # V itself inside the band, to the bit
    return 0.5 * torch.maximum(losses, held), held > losses
