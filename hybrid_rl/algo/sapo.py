import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import ratio

BOUNDS = {"tau_pos": (1e-6, None), "tau_neg": (1e-6, None)}


def loss(tokens: Tokens, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −(4/τ)·σ(τ(ρ − 1))·A, τ = tau_pos where A > 0, else tau_neg (SAPO, arXiv 2511.20347, eq. 5–6).

    A smooth gate instead of PPO's clip: the gradient has weight ρ · sech²(τ(ρ − 1)/2), 1 on-policy, and fades on both
    sides, faster for A ≤ 0. It silences no token outright, so clip_low and clip_high are 0. The loss's value on-policy
    is −2A/τ, not −A.
    """
    advantages = tokens.advantages
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = (tau * (ratio(tokens.logprobs, tokens.old_logprobs) - 1)).sigmoid() * 4 / tau
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return -gate * advantages, {"clip_low": never, "clip_high": never}
