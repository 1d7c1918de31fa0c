"""Losses, and batches of tokens to call them with, for the tests of losses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algo import aggregation, cispo, clip_cov, dppo_tv, gmpo, gspo, ppo_clip, reinforce, sapo
from hybrid_rl.algo.batch import Tokens

CONF = Path(__file__).parents[2] / "conf/algo/loss"
LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo_clip": ppo_clip.loss,
    "clip_higher": partial(ppo_clip.loss, clip_high=0.28),
    "without_dual_clip": partial(ppo_clip.loss, dual_clip=None),
    "gspo": gspo.loss,
    "gspo_wide": partial(gspo.loss, clip_low=0.2, clip_high=0.28),
    "cispo": cispo.loss,
    "cispo_narrow": partial(cispo.loss, clip_low=0.2, clip_high=0.28),
    "dppo_tv": dppo_tv.loss,
    "sapo": sapo.loss,
    "reinforce": reinforce.loss,
    "gmpo": gmpo.loss,
    "clip_cov": clip_cov.loss,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
Token = tuple[float, float, float, float]  # log π_θ, log π_old, log μ, A

logprob = st.floats(-6, 0)
advantage = st.integers(-192, 192).map(lambda n: n / 64)
token = st.tuples(logprob, logprob, logprob, advantage)
near = st.tuples(logprob, st.floats(-0.5, 0.5), st.floats(-0.5, 0.5), advantage).map(
    lambda t: (t[0], t[0] + t[1], t[0] + t[2], t[3])
)
aggregations = st.sampled_from([aggregation.token_mean, aggregation.seq_mean, aggregation.fixed])
rollouts = st.lists(st.lists(near | token, min_size=1, max_size=5), min_size=1, max_size=6)


def batch(given_rollouts: list[list[Token]], dtype: torch.dtype = torch.float64) -> Tokens:
    columns = zip(*(t for r in given_rollouts for t in r), strict=True)
    new, old, behaviour, advantages = (torch.tensor(column, dtype=dtype) for column in columns)
    rollout = torch.tensor([i for i, r in enumerate(given_rollouts) for _ in r])
    return Tokens(
        new.requires_grad_(), old, behaviour, advantages, rollout, torch.ones_like(old), (old * 64).frac() < -0.5
    )


def at(tokens: Tokens, index: Tensor) -> Tokens:
    new = tokens.logprobs.detach()[index].requires_grad_()
    names = ("old_logprobs", "behaviour_logprobs", "advantages", "rollout", "entropy", "look")
    return Tokens(new, *(getattr(tokens, name)[index] for name in names))


def gradient(losses: Tensor, tokens: Tokens, weights: Tensor | float = 1.0) -> Tensor:
    (found,) = torch.autograd.grad((weights * losses).sum(), tokens.logprobs, retain_graph=True)
    return found
