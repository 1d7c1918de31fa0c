"""Ratios of two policies' probabilities of the same tokens; every exp() of a log-ratio is computed here."""

from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # keeps exp() finite whatever happened to the policy
LOGPROB_FLOOR = -1e4  # far below what any sampled token has; −inf − −inf would be NaN, and −inf · 0 too


def floored(logprobs: Tensor) -> Tensor:
    """Return log-probabilities of at least −1e4, without a gradient below; NaN stays NaN, to show a broken forward."""
    return logprobs.clamp_min(LOGPROB_FLOOR)


def log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """Return log π − log π_base, [M], clamped to ±20, beyond which there is no gradient."""
    return (floored(logprobs) - floored(base_logprobs)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """Return π / π_base, [M], between e^−20 and e^20."""
    return log_ratio(logprobs, base_logprobs).exp()


def quantiles(log_ratios: Tensor) -> dict[str, float]:
    """Return p01, p50, p99 and max of exp(log_ratios [N]), without any clamp; {} for no tokens.

    Quantile q is the token at place round(q · (N − 1)) in ascending order. Without interpolation, quantiles of a ratio
    are those of its logarithm, and any N works (torch.quantile refuses more than 2^24). A NaN becomes the max.
    """
    if not len(log_ratios):
        return {}
    shares = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}
    ordered = log_ratios.detach().sort().values
    values = ordered[[round(share * (len(ordered) - 1)) for share in shares.values()]]
    return dict(zip(shares, values.double().exp().tolist(), strict=True))
