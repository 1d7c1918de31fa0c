"""What every loss promises, whatever its formula."""

import inspect
import math
from pathlib import Path

import torch
from hydra.utils import get_method, instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hybrid_rl.algo import aggregation, kl_cov, ppo_clip
from hybrid_rl.algo.batch import Tokens
from tests.algo.losses import LOSSES, Token, aggregations, at, batch, every_loss, gradient, rollouts

CONF = Path(__file__).parents[2] / "conf/algo/loss"


@every_loss
@given(given_rollouts=rollouts, data=st.data())
def test_order_means_nothing(loss, given_rollouts: list[list[Token]], data) -> None:
    tokens = batch(given_rollouts)
    order = torch.tensor(data.draw(st.permutations(range(len(tokens.rollout)))))
    losses, statistics = loss(tokens)
    moved = at(tokens, order)
    moved.rollout = 1000 - 7 * moved.rollout  # nor do the rollouts' numbers
    permuted, others = loss(moved)
    torch.testing.assert_close(permuted, losses[order], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(permuted, moved), gradient(losses, tokens)[order], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(others[name], column[order]) for name, column in statistics.items())


@every_loss
@given(given_rollouts=rollouts, aggregate=aggregations, data=st.data())
def test_micro_batches_add_up_to_the_batch(loss, aggregate, given_rollouts: list[list[Token]], data) -> None:
    tokens = batch(given_rollouts)
    count = len(given_rollouts)
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))[tokens.rollout]
    weights, divisor = aggregate(kept, tokens.rollout, 64)
    total = (weights * loss(tokens)[0]).sum() / divisor
    whole = gradient(loss(tokens)[0], tokens, weights / divisor)
    chunk = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))[tokens.rollout]
    sums, parts = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole)
    for number in range(3):  # one of them may be empty
        index = (chunk == number).nonzero().squeeze(1)
        own = at(tokens, index)
        losses, _ = loss(own)
        sums += (weights[index] * losses).sum().detach() / divisor
        parts[index] = gradient(losses, own, weights[index] / divisor)
    torch.testing.assert_close(sums, total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@every_loss
@given(given_rollouts=rollouts, aggregate=aggregations, data=st.data())
def test_a_masked_rollout_leaves_no_trace(loss, aggregate, given_rollouts: list[list[Token]], data) -> None:
    count = len(given_rollouts)
    keep = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    broken = [r if k else [(-math.inf, -1.0, -math.inf, 1e6), *r] for r, k in zip(given_rollouts, keep, strict=True)]
    results = []
    for members, mask in (
        (broken, keep),
        ([r for r, k in zip(given_rollouts, keep, strict=True) if k], [True] * sum(keep)),
    ):
        tokens = batch(members)
        kept = torch.tensor(mask)[tokens.rollout]
        weights, divisor = aggregate(kept, tokens.rollout, 64)
        losses, _ = loss(tokens)
        slope = gradient(losses, tokens, weights.double() / divisor)
        assert slope[~kept].count_nonzero() == 0
        results.append(((weights * losses).sum().detach() / divisor, slope[kept]))
    share = 1.0 if aggregate is aggregation.token_mean else sum(keep) / count  # the others' divisors count it
    torch.testing.assert_close(results[0], tuple(share * r for r in results[1]), rtol=1e-12, atol=1e-12)


@every_loss
@given(given_rollouts=rollouts, scale=st.sampled_from([0.125, 0.5, 4.0, 64.0]))
def test_scaling_the_advantages_scales_loss_and_gradient(loss, given_rollouts: list[list[Token]], scale: float) -> None:
    tokens = batch(given_rollouts)
    losses, statistics = loss(tokens)
    slope = gradient(losses, tokens)
    tokens.advantages = scale * tokens.advantages  # a power of two: exact
    scaled, others = loss(tokens)
    torch.testing.assert_close(scaled, scale * losses, rtol=1e-14, atol=1e-300)
    torch.testing.assert_close(gradient(scaled, tokens), scale * slope, rtol=1e-14, atol=1e-300)
    assert all(torch.equal(others[name], column) for name, column in statistics.items())


@every_loss
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_on_policy_the_gradient_is_the_policy_gradient(loss, lengths: list[int], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    logprobs = (-7 * torch.rand(len(rollout), generator=generator)).to(dtype)
    advantages = torch.randn(len(lengths), generator=generator).to(dtype)[rollout]  # one a rollout, as GSPO has it
    tokens = Tokens(logprobs.clone().requires_grad_(), logprobs, logprobs, advantages, rollout, logprobs, rollout < 0)
    losses, statistics = loss(tokens)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(gradient(losses, tokens), -advantages, rtol=tolerance, atol=0)
    assert not any(column.any() for column in statistics.values())


def test_ppo_clip_on_policy_is_exact_in_float32() -> None:
    logprobs, advantages = torch.tensor([-1.0, -7.0]), torch.tensor([0.75, -0.25])
    tokens = Tokens(logprobs.clone().requires_grad_(), logprobs, logprobs, advantages, torch.tensor([0, 1]), logprobs)
    losses, _ = ppo_clip.loss(tokens)
    assert torch.equal(losses, -advantages)
    assert torch.equal(gradient(losses, tokens), -advantages)


EXTREMES = [-math.inf, -3e38, -1e5, -90.0, -1.0, 0.0]


@every_loss
def test_loss_and_gradient_stay_finite_whatever_happened(loss) -> None:
    facts = [(new, old, mu, a) for new in EXTREMES for old in EXTREMES for mu in EXTREMES for a in (2.0, -2.0, 0.0)]
    for together in ([facts], [[f] for f in facts]):  # all one rollout's, or one each
        tokens = batch(together, torch.float32)
        losses, statistics = loss(tokens)
        assert losses.isfinite().all()
        assert losses.abs().max() <= 2 * math.exp(20) * 1.001
        assert gradient(losses, tokens).isfinite().all()
        assert all(column.float().isfinite().all() for column in statistics.values())


@every_loss
def test_a_nan_is_not_hidden(loss) -> None:
    tokens = batch([[(math.nan, -1.0, -1.0, 1.0)], [(-1.0, -1.0, -1.0, 1.0)]], torch.float32)
    assert loss(tokens)[0].isnan().tolist() == [
        True,
        False,
    ]  # a broken forward must reach the gradient's norm, where a step is refused


@every_loss
def test_gradient_flows_through_the_new_logprobs_alone(loss) -> None:
    torch.manual_seed(1)
    columns = [(-3 * torch.rand(6)).requires_grad_() for _ in range(4)]
    tokens = Tokens(
        columns[0],
        *(c.detach() for c in columns[1:]),
        torch.tensor([0, 0, 1, 1, 1, 2]),
        torch.ones(6),
        torch.zeros(6, dtype=torch.bool),
    )
    before = [c.detach().clone() for c in columns]
    losses, statistics = loss(tokens)
    assert losses.shape == (6,)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert columns[0].grad is not None
    assert all(c.grad is None for c in columns[1:])
    assert all(torch.equal(c.detach(), b) for c, b in zip(columns, before, strict=True))
    assert {"clip_low", "clip_high"} <= statistics.keys()
    assert all(column.shape == (6,) and not column.requires_grad for column in statistics.values())


@every_loss
def test_no_tokens_is_no_error(loss) -> None:
    empty = torch.zeros(0)
    tokens = Tokens(torch.zeros(0, requires_grad=True), empty, empty, empty, empty.long(), empty, empty.bool())
    losses, statistics = loss(tokens)
    assert losses.shape == (0,)
    assert gradient(losses, tokens).shape == (0,)
    assert all(column.shape == (0,) for column in statistics.values())


# ---- conf/algo/loss -----------------------------------------------------------------------------------------------------


def test_every_option_file_is_a_loss_with_its_defaults() -> None:
    names = {path.stem for path in CONF.glob("*.yaml")}
    assert names == {
        "ppo_clip",
        "clip_higher",
        "gspo",
        "cispo",
        "dppo_tv",
        "sapo",
        "reinforce",
        "gmpo",
        "kl_cov",
        "clip_cov",
    }
    for name in names:
        text = (CONF / f"{name}.yaml").read_text()
        assert text.startswith("# ")
        option = OmegaConf.to_container(OmegaConf.create(text))
        defaults = {
            k: p.default
            for k, p in inspect.signature(get_method(option["_target_"])).parameters.items()
            if k != "tokens"
        }
        assert option == {
            "_target_": option["_target_"],
            **defaults,
            **({"clip_high": 0.28} if name == "clip_higher" else {}),
        }
        tokens = batch([[(-1.0, -1.25, -1.5, 1.0), (-1.0, -0.5, -1.5, -1.0)]])
        expected = LOSSES.get(name, kl_cov.loss)
        assert torch.equal(instantiate(option, _partial_=True)(tokens)[0], expected(tokens)[0])
