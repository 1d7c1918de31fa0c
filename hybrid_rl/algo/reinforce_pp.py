import torch
from torch import Tensor

from hybrid_rl.algo import mean_only
from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.grpo import is_constant


def advantages(batch: Scored, baseline: bool = True) -> Tensor:
    """Whitened over the batch's kept tokens → [N] (REINFORCE++, arXiv 2501.03262): r − μ of the group, or with
    `baseline` false the return.

    r = [1, 0, 0, 0], one token each, gives [1.5, −0.5, −0.5, −0.5] both ways. A group of equal rewards, or a single
    rollout, is 0 before the whitening.
    """
    if baseline:
        return whiten(batch, batch.to_tokens(mean_only.advantages(batch)))
    return whiten(batch, batch.returns)


def whiten(batch: Scored, column: Tensor, eps: float = 1e-8) -> Tensor:
    """(x − mean) / √(var + eps), [N] → [N], mean and variance (ddof 1) of the kept tokens; 0 at all others.

    Fewer than two kept tokens, or tokens that are all equal, give 0.
    """
    kept = batch.to_tokens(batch.kept)
    values, whitened = column[kept], torch.zeros_like(column)
    if len(values) > 1 and not is_constant(values):
        whitened[kept] = (values - values.mean()) * (values.var(correction=1) + eps).rsqrt()
    return whitened
