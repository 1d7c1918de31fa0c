import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import log_ratio, ratio

BOUNDS = {"delta_low": (0, None), "delta_high": (0, None), "kl_tau": (0, None)}


def loss(
    tokens: Tokens, delta_low: float = 0.2, delta_high: float = 0.2, kl_tau: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −ρA; 0 where A > 0 and π_θ − μ > delta_high, or A ≤ 0 and π_θ − μ < −delta_low (DPPO, arXiv
    2602.04879).

    μ is what the token was sampled with (the engine's probability), ρ = π_θ / π_old. The trust region is one of total
    variation: a rare token may grow many times over, a likely one may not fall from 1 to 0.75. ρ has no bound of its
    own but e^20; verl cuts it at 3 (its clip_ratio_c). kl_tau: adds kl_tau·(log π_θ − log μ)² at every token, also at
    silenced ones; prime-rl has 1e-3. Unlike PPO's clip this can silence a token on-policy, if the engine's μ is far
    off.
    """
    moved = tokens.logprobs.exp() - tokens.behaviour_logprobs.exp()
    rising = tokens.advantages > 0
    low, high = ~rising & (moved < -delta_low), rising & (moved > delta_high)
    losses = -ratio(tokens.logprobs, tokens.old_logprobs) * tokens.advantages
    pull = kl_tau * log_ratio(tokens.logprobs, tokens.behaviour_logprobs).square()
    return torch.where(low | high, 0.0, losses) + pull, {"clip_low": low, "clip_high": high}
