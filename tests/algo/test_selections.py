"""What is found in a whole minibatch before its rows: selections of tokens, and the looks of kl_cov and clip_cov."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from hybrid_rl.algo import clip_cov, kl_cov, opsm, top_entropy
from hybrid_rl.algo.batch import Tokens

CONF = Path(__file__).parents[2] / "conf/algo/selection"
Token = tuple[float, float, float, float]  # log π_θ, log π_old, A, entropy
token = st.tuples(
    st.floats(-6, 0),
    st.floats(-6, 0),
    st.integers(-4, 4).map(lambda n: n / 2),
    st.integers(0, 40).map(lambda n: n / 16),
)
rollouts = st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=6)


def minibatch(facts: list[list[Token]], dtype: torch.dtype = torch.float64) -> Tokens:
    new, old, advantages, entropy = (
        torch.tensor(c, dtype=dtype) for c in zip(*(t for r in facts for t in r), strict=True)
    )
    return Tokens(new, old, old - 9, advantages, torch.tensor([i for i, r in enumerate(facts) for _ in r]), entropy)


@given(facts=rollouts, share=st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.75, 1.0]))
def test_top_entropy_is_at_least_the_quantile_as_in_trl(facts: list[list[Token]], share: float) -> None:
    entropies = np.array([t[3] for r in facts for t in r])
    expected = entropies >= np.quantile(entropies, 1 - share) - 1e-12  # TRL: torch.quantile over all processes, then >=
    found = top_entropy.select(minibatch(facts), share)
    assert found.tolist() == expected.astype(float).tolist()
    assert found.sum() >= max(1, math.floor(share * len(entropies)))


@given(facts=rollouts, delta=st.sampled_from([0.0, 1e-4, 0.5, 2.0]))
def test_opsm_leaves_out_bad_rollouts_that_the_policy_has_left(facts: list[list[Token]], delta: float) -> None:
    expected = []
    for r in facts:
        left = math.fsum(old - new for new, old, _, _ in r) / len(r)
        if abs(left - delta) < 1e-9:
            return
        expected += [0.0 if a < 0 and left > delta else 1.0 for _, _, a, _ in r]
    assert opsm.select(minibatch(facts), delta).tolist() == expected


def covariances(facts: list[list[Token]]) -> list[float]:
    tokens = [t for r in facts for t in r]
    logprob, advantage = (math.fsum(t[i] for t in tokens) / len(tokens) for i in (0, 2))
    return [(t[0] - logprob) * (t[2] - advantage) for t in tokens]


@given(facts=rollouts, share=st.sampled_from([0.0, 2e-4, 0.25, 1.0]))
def test_kl_cov_looks_at_the_highest_covariances(facts: list[list[Token]], share: float) -> None:
    by_hand = covariances(facts)
    ranked = sorted(by_hand, reverse=True)
    bound = ranked[max(1, int(share * len(ranked))) - 1]
    found = kl_cov.look(minibatch(facts), share).tolist()
    for seen, value in zip(found, by_hand, strict=True):
        if abs(value - bound) > 1e-9 and abs(value) > 1e-9:
            assert seen == (value > bound and value > 0)
    torch.testing.assert_close(
        kl_cov.covariances(minibatch(facts)), torch.tensor(by_hand, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_kl_cov_looks_at_none_where_nothing_covaries() -> None:
    assert not kl_cov.look(minibatch([[(-1.0, -1.0, 1.0, 0.5), (-2.0, -1.0, 1.0, 0.5)]]), share=1.0).any()


@given(facts=rollouts, share=st.sampled_from([2e-4, 0.25, 1.0]))
def test_clip_cov_draws_from_the_band_what_ppo_does_not_clip(facts: list[list[Token]], share: float) -> None:
    tokens = [t for r in facts for t in r]
    allowed = []
    for (new, old, a, _), value in zip(tokens, covariances(facts), strict=True):
        ratio = math.exp(new - old)
        allowed.append(0.2 + 1e-9 < value < 5.0 - 1e-9 and not (a > 0 and ratio > 1.2) and not (a < 0 and ratio < 0.8))
    found = clip_cov.look(minibatch(facts), share, lower=0.2).tolist()
    wanted = min(max(1, int(share * len(tokens))), sum(allowed))
    assert sum(found) in range(wanted, wanted + 2)  # one more where rounding decides
    assert all(
        ok or abs(c - 0.2) < 1e-6 or abs(c - 5) < 1e-6
        for ok, seen, c in zip(allowed, found, covariances(facts), strict=True)
        if seen
    )


def test_clip_covs_draw_follows_from_the_seed() -> None:
    facts = [[(-0.01 * i, -0.01 * i, float(i % 2), 0.5) for i in range(400)]]

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return clip_cov.look(minibatch(facts), share=0.05, lower=0.0)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert drawn(1).sum() == 20


LOOKS: list[Callable[[Tokens], Tensor]] = [top_entropy.select, opsm.select, kl_cov.look]


@pytest.mark.parametrize("look", LOOKS)
@given(facts=rollouts, data=st.data())
def test_the_order_of_the_rollouts_means_nothing(look, facts: list[list[Token]], data) -> None:
    order = data.draw(st.permutations(range(len(facts))))
    whole = look(minibatch(facts, torch.float64)).split([len(r) for r in facts])
    other = look(minibatch([facts[i] for i in order])).split([len(facts[i]) for i in order])
    if look is kl_cov.look and len({round(c, 9) for c in covariances(facts)}) < sum(map(len, facts)):
        return  # of ties, rounding of the means may take one and leave the other
    assert all(torch.equal(whole[i], other[place]) for place, i in enumerate(order))


def test_every_selection_file_names_its_part_with_its_defaults() -> None:
    selections = {"top_entropy": top_entropy.select, "opsm": opsm.select}
    assert selections.keys() == {path.stem for path in CONF.glob("*.yaml")}
    for name, select in selections.items():
        text = (CONF / f"{name}.yaml").read_text()
        assert text.startswith("# ")
        option = OmegaConf.to_container(OmegaConf.create(text))[name]
        defaults = {k: p.default for k, p in inspect.signature(select).parameters.items() if k != "minibatch"}
        assert option == {"_target_": f"hybrid_rl.algo.{name}.select", **defaults}
        assert instantiate(option, _partial_=True)(minibatch([[(-1.0, -1.0, 1.0, 0.5)]])).tolist() == [1.0]
