from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.declared import PartError
from hybrid_rl.algo.grpo import is_constant

NEEDS = ("group", "parts")
BOUNDS = {"eps": (0, None)}


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if run.algo.kl.coef and run.algo.kl.place.name == "reward":
        yield (
            "algo.kl.place",
            "is subtracted from the whole reward, and gdpo uses only its parts; use algo.kl.place=loss",
        )


def advantages(batch: Scored, weights: Mapping[str, float] | None = None, eps: float = 1e-6) -> Tensor:
    """Σ_k w_k · (r_k − μ_k) / (σ_k + eps) over the parts k of the reward, then (x − mean) / (std + eps) over the
    batch's kept rollouts → [R].

    μ_k and σ_k (ddof 1) are those of the part in its group (GDPO, arXiv 2601.05242): parts of unlike scale count alike,
    and rollouts with equal sums and unlike parts differ. weights: by name of the parts to use; null: 1 for each. A part
    that is constant in a group adds 0 there. Parts [1, 1, 0, 0] and [0, 0, 0, 10] of one group sum to 0.366, 0.366,
    −1.366, 0.634 before the batch's norm. Rollouts that are not kept get 0, as do all if fewer than two are kept or all
    are equal.
    """
    weights = dict.fromkeys(batch.parts, 1.0) if weights is None else weights
    total = torch.zeros_like(batch.outcomes)
    for name, weight in weights.items():
        if name not in batch.parts:
            raise PartError(
                f"algo.advantage.weights names {name!r}, and the parts of the reward are "
                f"{', '.join(sorted(batch.parts))}"
            )
        total = total + weight * batch.per_group_of(lambda r: _normed(r, eps), batch.parts[name])
    normed = torch.zeros_like(total)
    normed[batch.kept] = _normed(total[batch.kept], eps)
    return normed


def _normed(values: Tensor, eps: float) -> Tensor:
    if len(values) < 2 or is_constant(values):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std(correction=1) + eps)
