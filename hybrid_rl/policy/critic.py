"""The critic: a causal LM whose head predicts the return before each token is sampled (PPO's V)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hybrid_rl.algo.batch import Given
from hybrid_rl.policy import lora
from hybrid_rl.policy.model import Policy, SideModel
from hybrid_rl.policy.numbers import alone, find, finite
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.rows import Accumulated, RowLoss, Update, accumulate, measure
from hybrid_rl.policy.sharding import local
from hybrid_rl.types import PackedBatch, Rollout


class ValueModel(SideModel):
    """A model like a policy's, with all weights trained and a head of one row of zeros, so that values begin as 0."""

    def _adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        old = model.get_output_embeddings().weight
        model.config.tie_word_embeddings = False
        head = nn.utils.skip_init(nn.Linear, old.shape[1], 1, bias=False, device=old.device, dtype=old.dtype)
        nn.init.zeros_(head.weight)
        model.set_output_embeddings(head)
        return model

    def values(self, row: PackedBatch) -> Tensor:
        """Return V, [M] float32, of the states in which the row's tokens were sampled.

        The last product is float32: half precision has too few digits for its sum.
        """
        return self._body_and_head(
            row, lambda hidden, head, targets: linear(hidden.float(), head.weight.float()).sum(-1)
        )

    @torch.no_grad()
    def begin_as(self, policy: Policy) -> None:
        """Copy the policy's weights except the head, adapters merged; both have the same shards. Collective."""
        head = self.model.get_output_embeddings().weight
        for name, _, rows in lora.merged(policy.parameters, policy.model):
            ours = self.parameters.get(name)
            if ours is not None and ours is not head:
                local(ours).copy_(rows)


@dataclass(slots=True)
class Critic:
    """A value model and its optimizer, with the `clip` of `value_loss`; parked memory returns when it is needed."""

    model: ValueModel
    optimizer: Optimizer
    clip: float = 0.0

    def values(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return V of all N sampled tokens, [N] float32, in rollout order; the same on every rank. Collective."""
        self.unpark()
        return measure(self.model, rollouts, lambda row: (self.model.values(row),), 1)[0]

    def update(self, rollouts: Sequence[Rollout], values: Tensor, targets: Tensor, given: Given) -> Update:
        """Take one optimizer step towards `targets` [N]; `values` [N] are the predictions before the step's updates.

        `given` weights tokens as in the policy's loss; the result does not depend on rows or ranks. The step is skipped
        for a non-finite loss or gradient. Collective: every rank gets the whole batch, and all return the same numbers.
        """
        done = self.forward_backward(rollouts, values, targets, given)
        fault = None if finite([done.losses]) else find({"value loss": done.losses}, rollouts)
        if fault:
            fault = alone(fault, self.values, rollouts)
        result = self.optimizer.skip(fault) if fault else self.optimizer.step()
        numbers = {
            "value_loss": float(done.losses.sum()) / given.divisor,
            "value_clip": float(done.columns["clipped"].sum()) / max(1, len(values)),
            "value_grad_norm": result.grad_norm,
            "skipped": float(result.skipped),
        }
        return Update(numbers, result.fault)

    def forward_backward(
        self, rollouts: Sequence[Rollout], values: Tensor, targets: Tensor, given: Given
    ) -> Accumulated:
        """Add the gradient of the scaled loss to the parameters'. Collective.

        The columns hold the weighted loss of each token and, as "clipped", 1 if the clamp keeps it from having a
        gradient.
        """
        self.unpark()

        def loss(row: PackedBatch) -> RowLoss:
            at = row.token_index
            losses, clipped = value_loss(self.model.values(row), values[at], targets[at], self.clip)
            return RowLoss(given.weights[at] * losses, {"clipped": clipped.float()})

        return accumulate(self.model, rollouts, loss, self.optimizer.scale / given.divisor)

    def park(self) -> None:
        """Move weights and moments to host memory, while the engine samples."""
        self.model.park()
        self.optimizer.park()

    def unpark(self) -> None:
        """Move parked weights and moments back to the device."""
        self.model.unpark()
        self.optimizer.unpark()


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return ½ max((V − R)², (clamp(V, V_old ± clip) − R)²), and whether the clamp removes the gradient; [M] each.

    As in PPO2 (github.com/openai/baselines, ppo2/model.py), a token has no gradient once V has moved by `clip` towards
    R. clip = 0: ½ (V − R)². V_old = 0, clip = 0.2, R = 1: V = 0.1 → 0.405; V = 0.5 → 0.32, clipped; V = −0.5 → 1.125,
    not clipped, because V moved away.
    """
    losses = (values - targets).square()
    if not clip:
        return 0.5 * losses, torch.zeros_like(losses, dtype=torch.bool)
    held = (values.clamp(old - clip, old + clip) - targets).square()  # inside the band exactly V
    return 0.5 * torch.maximum(losses, held), held > losses


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that the values explain: 1 − Var(R − V) / Var(R); 0 if none varies."""
    spread = float(targets.var()) if len(targets) > 1 else 0.0
    return 1 - float((targets - values).var()) / spread if spread > 0 else 0.0
