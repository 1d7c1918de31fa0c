from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.gae import discounted, following
from hybrid_rl.algo.ratio import ratio

NEEDS = ("values", "silent")
BOUNDS = {"gamma": (0, 1), "lam": (0, 1), "c_bar": (0, None)}


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if own["rho_bar"] < own["c_bar"]:
        yield "rho_bar", f"must be at least c_bar = {own['c_bar']:g}"


def advantages(
    batch: Scored, gamma: float = 1.0, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0
) -> tuple[Tensor, Tensor]:
    """ρ_t (r_t + γ·v_{t+1} − V_t), and the critic's targets v_t, [N] both: V-trace for tokens that an older policy
    sampled.

    v_t = V_t + Σ_{s≥t} γ^{s−t} (Π_{t≤i<s} c_i) ρ_s (r_s + γ·V_{s+1} − V_s), with w = exp(old − behaviour logprobs), ρ =
    min(ρ̄, w) and c = λ·min(c̄, w), ρ̄ ≥ c̄ (IMPALA, arXiv 1802.01561, eq. 1 and remark 2). V and v after a rollout's
    last token are 0. With w = 1 the targets are GAE's. r = [0, 0, 1], V = 0.5 throughout, w = [0.5, 1, 1]: targets
    [0.75, 1, 1], advantages [0.25, 0.5, 0.5].
    """
    values = batch.values
    assert values is not None, "vtrace needs values"
    weight = ratio(batch.old_logprobs, batch.behaviour_logprobs)
    rho, c = weight.clamp(max=rho_bar), lam * weight.clamp(max=c_bar)
    rewards = batch.token_rewards
    delta = rho * (rewards + gamma * following(batch, values) - values)
    targets = values + discounted(batch, delta, gamma * c)
    return rho * (rewards + gamma * following(batch, targets) - values), targets
