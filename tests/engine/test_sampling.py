import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.engine.base import Sampling
from hybrid_rl.engine.sampling import LARGEST_UNIFORM, sample, uniforms

LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # of float32


def logits_of(vocabulary: int, seed: int = 0, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))


def exact(logits: Tensor, sampling: Sampling) -> np.ndarray:
    """What should be drawn, token by token in float64: temperature, then top-k, then top-p, then renormalised."""
    scaled = logits.double().numpy() / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    order = order[: sampling.top_k] if sampling.top_k else order
    mass, kept = sum(p[i] for i in order), []
    for token in order:  # the fewest most likely tokens that hold top_p of the mass
        if kept and sum(p[i] for i in kept) >= sampling.top_p * mass:
            break
        kept.append(token)
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> np.ndarray:
    return sample(logits.expand(len(uniform), -1), uniform, sampling)[0].numpy()


def chi_square_is_plausible(counts: np.ndarray, p: np.ndarray) -> bool:
    """Within five standard deviations of the statistic's mean, rare tokens taken together."""
    expected = p * counts.sum()
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return ((observed - expected) ** 2 / expected).sum() <= freedom + 5 * np.sqrt(2 * freedom)


settings = [
    Sampling(), Sampling(temperature=0.6), Sampling(temperature=1.8), Sampling(top_k=5), Sampling(top_k=1), Sampling(top_p=0.9),
    Sampling(top_p=0.05), Sampling(temperature=0.6, top_k=20, top_p=0.8), Sampling(top_k=1000, top_p=0.999),
]  # fmt: skip


@pytest.mark.parametrize("sampling", settings, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_even_grid_of_uniforms_draws_each_token_in_proportion(sampling: Sampling, seed: int) -> None:
    logits, n = logits_of(40, seed), 8192
    counts = np.bincount(draw(logits, (torch.arange(n) + 0.5) / n, sampling), minlength=40)
    assert np.abs(counts - n * exact(logits, sampling)).max() <= 1.1  # the grid can be off by one step, plus rounding


@pytest.mark.parametrize("sampling", settings, ids=str)
def test_frequencies_of_a_requests_stream_are_the_probabilities(sampling: Sampling) -> None:
    logits = logits_of(40, 3)
    counts = np.bincount(draw(logits, torch.from_numpy(uniforms(11, 20_000)), sampling), minlength=40)
    p = exact(logits, sampling)
    assert chi_square_is_plausible(counts, p)
    assert counts[p == 0].sum() == 0


def test_the_chi_square_check_can_fail() -> None:
    logits = logits_of(40, 3)
    counts = np.bincount(draw(logits, torch.from_numpy(uniforms(11, 20_000)), Sampling(temperature=0.9)), minlength=40)
    assert not chi_square_is_plausible(counts, exact(logits, Sampling()))


@given(
    seed=st.integers(0, 999),
    sampling=st.builds(
        Sampling, temperature=st.floats(0.2, 3), top_k=st.integers(0, 12), top_p=st.floats(0.05, 1.0)
    ),
)  # fmt: skip
def test_filters_keep_what_brute_force_keeps(seed: int, sampling: Sampling) -> None:
    logits, n = logits_of(10, seed), 4096
    counts = np.bincount(draw(logits, (torch.arange(n) + 0.5) / n, sampling), minlength=10)
    p = exact(logits, sampling)
    edge = exact(logits, Sampling(sampling.temperature, sampling.top_k, min(1.0, sampling.top_p + 1e-5)))
    if np.array_equal(p > 0, edge > 0):  # top_p is not on the border of a token within rounding
        assert np.abs(counts - n * p).max() <= 1.1


@pytest.mark.parametrize("uniform", [0.0, 2.0**-30, 0.5, LARGEST_BELOW_ONE])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6), Sampling(top_k=3), Sampling(top_p=0.5)], ids=str
)
def test_a_token_of_no_probability_is_never_drawn(uniform: float, sampling: Sampling) -> None:
    for seed in range(50):
        logits = logits_of(30, seed)
        logits[[0, 7, 28, 29]] = -1e9  # at both ends, where a cumulative sum is off by one
        ids, logprobs = sample(logits[None], torch.tensor([uniform]), sampling)
        assert exact(logits, sampling)[ids.item()] > 0
        assert logprobs.isfinite().all()


def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_possible_token() -> None:
    logits = torch.tensor([-1e9, 0.0, 1.0, 0.0, -1e9])
    ends = torch.tensor([0.0, LARGEST_BELOW_ONE])
    assert draw(logits, ends, Sampling()).tolist() == [1, 3]
    assert draw(torch.zeros(151_936), ends, Sampling()).tolist()[0] == 0  # a large vocabulary: the sum's rounding
    assert draw(torch.zeros(151_936), ends, Sampling()).tolist()[1] < 151_936


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_logprob_is_of_the_whole_distribution_at_the_temperature(temperature: float, filters: dict) -> None:
    logits = torch.stack([logits_of(60, seed, scale=4.0) for seed in range(64)])
    ids, logprobs = sample(
        logits, torch.rand(64, generator=torch.Generator().manual_seed(0)), Sampling(temperature, **filters)
    )
    expected = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


def test_greedy_is_the_most_likely_token_whatever_the_uniform() -> None:
    logits = torch.stack([logits_of(60, seed) for seed in range(32)])
    for uniform in (0.0, 0.5, LARGEST_BELOW_ONE):
        assert torch.equal(sample(logits, torch.full((32,), uniform), Sampling(temperature=0.0))[0], logits.argmax(-1))


def test_rows_do_not_influence_each_other() -> None:
    logits = torch.stack([logits_of(50, seed) for seed in range(16)])
    uniform = torch.from_numpy(uniforms(1, 16))
    for sampling in settings:
        ids, logprobs = sample(logits, uniform, sampling)
        alone = [sample(logits[i : i + 1], uniform[i : i + 1], sampling) for i in range(16)]
        assert ids.tolist() == [a[0].item() for a in alone]
        assert logprobs.tolist() == [a[1].item() for a in alone]


def test_low_precision_logits_are_sampled_in_float32() -> None:
    logits = logits_of(50).bfloat16()
    ids, logprobs = sample(logits[None], torch.tensor([0.3]), Sampling(temperature=0.6))
    assert logprobs.item() == pytest.approx((logits.double() / 0.6).log_softmax(-1)[ids.item()].item(), abs=1e-5)


# ---- the random streams -----------------------------------------------------------------------------------------------


def test_uniforms_lie_in_the_half_open_unit_interval() -> None:
    assert LARGEST_UNIFORM == LARGEST_BELOW_ONE
    stream = uniforms(0, 200_000)
    assert stream.dtype == np.float32
    assert stream.min() >= 0
    assert stream.max() < 1
    assert abs(stream.mean() - 0.5) < 5 / np.sqrt(12 * 200_000)
    assert chi_square_is_plausible(np.histogram(stream, 64, (0, 1))[0], np.full(64, 1 / 64))


@given(seed=st.integers(-(2**70), 2**70), count=st.integers(0, 50), more=st.integers(0, 50))
def test_a_seed_fixes_its_stream_and_a_longer_one_starts_alike(seed: int, count: int, more: int) -> None:
    assert np.array_equal(uniforms(seed, count), uniforms(seed, count + more)[:count])


def test_streams_of_neighbouring_seeds_have_nothing_in_common() -> None:
    n = 4000
    streams = np.stack([uniforms(seed, n + 3) for seed in (0, 1, 2, 3, 1000, 1001, 2**32, 2**32 + 1)])
    for lag in range(4):  # shifted against each other too: a counter shared between seeds would show here
        correlation = np.corrcoef(streams[:, :n], streams[:, lag : lag + n])[:8, 8:]
        np.fill_diagonal(correlation, 0.0)
        assert np.abs(correlation).max() < 5 / np.sqrt(n)
    assert len(np.unique([uniforms(seed, 1)[0] for seed in range(2000)])) > 1990
