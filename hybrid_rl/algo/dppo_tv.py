import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import ratio


def loss(tokens: Tokens, delta_low: float = 0.2, delta_high: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −ρA; 0 where A > 0 and π_θ − μ > delta_high, or A ≤ 0 and π_θ − μ < −delta_low (DPPO, arXiv 2602.04879).

    μ is what the token was sampled with (the engine's probability), ρ = π_θ / π_old. The trust region is one of total
    variation: a rare token may grow many times over, a likely one may not fall from 1 to 0.75. ρ has no bound of its own but e^20;
    verl cuts it at 20 in the gradient. Unlike PPO's clip this can silence a token on-policy, where the engine's μ is far off.
    """
    moved = tokens.logprobs.exp() - tokens.behaviour_logprobs.exp()
    rising = tokens.advantages > 0
    low, high = ~rising & (moved < -delta_low), rising & (moved > delta_high)
    losses = -ratio(tokens.logprobs, tokens.old_logprobs) * tokens.advantages
    return torch.where(low | high, 0.0, losses), {"clip_low": low, "clip_high": high}
