from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.ratio import log_ratio

BOUNDS = {"cap": (1e-6, None)}


def correct(batch: Scored, cap: float = 2.0, level: Literal["token", "sequence"] = "token") -> tuple[Tensor, Tensor]:
    """min(w, cap), w = π_old / μ of trainer and engine: truncated importance sampling
    (fengyao.notion.site/off-policy-rl).

    All tokens are kept. level "sequence": w is the product over the rollout, before the cap the unbiased weight, which
    falls to 0 or rises to the cap as the rollout gets longer (`seq_mask` says how fast).
    """
    log_weights = log_ratio(batch.old_logprobs, batch.behaviour_logprobs)
    if level == "sequence":
        log_weights = batch.to_tokens(batch.sum_of_rollout(log_weights))
    elif level != "token":
        raise ValueError(f"tis: level={level!r} is neither 'token' nor 'sequence'")
    return log_weights.exp().clamp(max=cap), torch.ones_like(log_weights, dtype=torch.bool)
