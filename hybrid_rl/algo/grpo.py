import torch
from torch import Tensor


def advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """(r − μ) / (σ + eps) over a group's rewards [G] → [G], σ with ddof 1 (DeepSeekMath, arXiv 2402.03300, eq. 3).

    r = [1, 0, 0, 0] gives [1.5, −0.5, −0.5, −0.5]. Equal rewards, or one rollout, give 0 instead of noise over eps.
    """
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + eps)
