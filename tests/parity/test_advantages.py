"""Advantages as verl, TRL, SkyRL and OpenRLHF publish them, written down again from their formulas in numpy float64.

Each test says whether we agree to rounding, by how much another eps moves us, or that we differ on purpose. Their
layout is theirs: rewards [R] with a group index, and tokens in padded rows with a mask.
"""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybrid_rl.algo import gae, grpo, max_rl, mean_only, opo, pass_at_k, reinforce_pp, remax, rloo
from hybrid_rl.algo.batch import Scored

Array = NDArray[np.float64]
SIZES = [4, 8, 2, 16, 3]  # of the groups
EXACT = 1e-12


class Case:
    """Random rewards of unlike groups, lengths of 1 to 9 tokens, a penalty at each token, values of a critic."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.index = np.repeat(np.arange(len(SIZES)), SIZES)
        self.outcomes: Array = (
            random.normal(size=len(self.index)) if seed % 2 else random.integers(0, 2, len(self.index)).astype(float)
        )
        starts = np.cumsum([0, *SIZES[:-1]])
        self.outcomes[starts], self.outcomes[starts + 1] = 1.0, 0.0  # no group is all equal
        self.lengths = random.integers(1, 10, len(self.index))
        self.mask = np.arange(9)[None] < self.lengths[:, None]  # [R, 9]
        self.penalties: Array = random.normal(size=self.mask.shape) * self.mask * 0.1
        self.values: Array = random.normal(size=self.mask.shape) * self.mask

    def scored(self, penalties: bool = False) -> Scored:
        def flat(rows: Array) -> torch.Tensor:
            return torch.from_numpy(rows[self.mask])

        return Scored(
            torch.from_numpy(self.outcomes), SIZES, torch.from_numpy(self.lengths), torch.ones(len(self.index), dtype=torch.bool),
            flat(np.zeros_like(self.values)), flat(np.zeros_like(self.values)), flat(self.penalties) if penalties else None,
            flat(self.values), torch.full((len(self.index),), 0.25, dtype=torch.float64),
        )  # fmt: skip

    def token_rewards(self, penalties: bool = True) -> Array:
        """[R, 9]: the outcome at each row's last token."""
        rewards = self.penalties.copy() if penalties else np.zeros_like(self.penalties)
        rewards[np.arange(len(self.index)), self.lengths - 1] += self.outcomes
        return rewards

    def members(self) -> list[Array]:
        return [self.outcomes[self.index == g] for g in range(len(SIZES))]

    def of_group(self, statistic) -> Array:
        """[R]: a number of each rollout's group."""
        return np.array([statistic(r) for r in self.members()])[self.index]


@pytest.fixture(params=range(4))
def case(request) -> Case:
    return Case(request.param)


def differs(actual: torch.Tensor, expected: Array) -> float:
    return float(np.abs(actual.numpy() - expected).max())


def sample_std(r: Array) -> float:
    return float(np.std(r, ddof=1))


def masked_whiten(rows: Array, mask: NDArray[np.bool_], ddof: int = 1) -> Array:
    """verl's and TRL's, which is PPO's of 2019: (x − mean) · rsqrt(var + 1e-8) over all tokens, variance with Bessel's
    correction."""
    own = rows[mask]
    return (rows - own.mean()) / np.sqrt(own.var(ddof=ddof) + 1e-8)


# ---- GRPO: who adds what to which deviation -------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 1e-4, 1e-9])  # verl, slime, SkyRL; TRL, GRPO-Zero; OpenRLHF
def test_grpo_with_the_eps_of_each(case: Case, eps: float) -> None:
    theirs = (case.outcomes - case.of_group(np.mean)) / (case.of_group(sample_std) + eps)
    assert differs(grpo.advantages(case.scored(), eps), theirs) < EXACT


def test_grpo_of_trl_is_ours_scaled_by_its_larger_eps(case: Case) -> None:
    sigma = case.of_group(sample_std)
    trl = (case.outcomes - case.of_group(np.mean)) / (sigma + 1e-4)
    ours = grpo.advantages(case.scored())
    assert differs(ours, trl * (sigma + 1e-4) / (sigma + 1e-6)) < EXACT
    assert 0 < differs(ours, trl) <= 1e-4 * np.abs(trl / sigma).max()  # a few parts in ten thousand for 0/1 rewards


def test_grpo_worked_values() -> None:
    one = Scored(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), [4], torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool),
                 torch.zeros(4), torch.zeros(4))  # fmt: skip
    ours = grpo.advantages(one).numpy()
    assert ours == pytest.approx(np.array([1.5, -0.5, -0.5, -0.5]) / (1 + 2e-6), abs=EXACT)  # verl, slime, SkyRL
    assert ours[0] - 1.5 / (1 + 2e-4) == pytest.approx(2.97e-4, rel=1e-3)  # TRL
    population = np.std([1.0, 0, 0, 0])  # numpy's default, in GRPO-Zero and nano-aha: ddof 0
    assert population == pytest.approx(0.4330, abs=1e-4)
    assert 0.75 / (population + 1e-4) == pytest.approx(1.7317, abs=1e-4)
    assert ours[0] != pytest.approx(1.7317, abs=0.2)  # on purpose: the sample's deviation


def test_a_population_deviation_is_a_larger_step_for_small_groups(case: Case) -> None:
    theirs = (case.outcomes - case.of_group(np.mean)) / (case.of_group(np.std) + 1e-6)
    sizes = case.of_group(len)
    assert np.allclose(grpo.advantages(case.scored()).numpy(), theirs * np.sqrt((sizes - 1) / sizes), rtol=1e-4)


def test_dr_grpo_is_the_centred_reward(case: Case) -> None:
    assert (
        differs(mean_only.advantages(case.scored()), case.outcomes - case.of_group(np.mean)) < EXACT
    )  # prime-rl, nanochat, verl without std


# ---- where a group has no signal: on purpose -------------------------------------------------------------------------------


def alone(reward: float) -> Scored:
    return Scored(
        torch.tensor([reward], dtype=torch.float64),
        [1],
        torch.tensor([2]),
        torch.tensor([True]),
        torch.zeros(2),
        torch.zeros(2),
    )


def test_a_single_rollout_keeps_its_raw_reward_in_verl_and_gets_nothing_here() -> None:
    verl_grpo = (5.0 - 0.0) / (1.0 + 1e-6)  # mean 0 and deviation 1 stand in for a group of one
    verl_rloo = verl_opo = 5.0
    assert min(verl_grpo, verl_rloo, verl_opo) > 4.99
    for estimator in (grpo, mean_only, rloo, opo, max_rl):
        assert estimator.advantages(alone(5.0)).tolist() == [0]


def test_equal_rewards_are_noise_over_eps_elsewhere_and_nothing_here() -> None:
    rewards = np.full(7, 0.1, dtype=np.float32)
    mean = np.float32(0.1) + np.float32(
        2**-27
    )  # a mean that another order of summing can give: one unit in the last place
    assert np.float32(mean) != rewards[0]
    theirs = (rewards - mean) / np.float32(1e-6)
    assert np.abs(theirs).max() > 5e-3
    batch = Scored(
        torch.from_numpy(rewards),
        [7],
        torch.ones(7, dtype=torch.int64),
        torch.ones(7, dtype=torch.bool),
        torch.zeros(7),
        torch.zeros(7),
    )
    for estimator in (grpo, mean_only, rloo, opo, max_rl, reinforce_pp):
        assert estimator.advantages(batch).tolist() == [0] * 7


# ---- other baselines -----------------------------------------------------------------------------------------------------


def test_rloo_of_verl_and_of_trl(case: Case) -> None:
    size = case.of_group(len)
    verl = case.outcomes * size / (size - 1) - case.of_group(np.mean) * size / (size - 1)
    trl = case.outcomes - (case.of_group(np.sum) - case.outcomes) / (size - 1)
    assert differs(rloo.advantages(case.scored()), verl) < EXACT
    assert differs(rloo.advantages(case.scored()), trl) < EXACT


def test_opo_of_verl(case: Case) -> None:
    weighted = np.array(
        [
            case.outcomes[own] @ case.lengths[own] / case.lengths[own].sum()
            for own in (case.index == g for g in range(len(SIZES)))
        ]
    )
    assert differs(opo.advantages(case.scored()), case.outcomes - weighted[case.index]) < EXACT


def test_max_rl_of_prime_rl_and_of_skyrl(case: Case) -> None:
    mean = case.of_group(np.mean)
    prime = np.where(mean > 0, (case.outcomes - mean) / np.where(mean > 0, mean, 1), 0)
    ours = max_rl.advantages(case.scored())
    assert differs(ours, prime) < 1e-9
    skyrl = (case.outcomes - mean) / (mean + 1e-6)
    positive = mean > 0
    gap = np.abs(ours.numpy() - skyrl)[positive]
    assert np.all(gap <= np.abs(prime[positive]) * 1e-6 / mean[positive] + EXACT)
    assert np.all(ours.numpy()[~positive] == 0)  # on purpose: there theirs turns the sign of every advantage


def test_pass_at_group_size_of_verl_without_its_division(case: Case) -> None:
    """verl gives the best of a group r_max − r_second, over the deviation by default; the others nothing."""
    for r in case.members():
        batch = Scored(torch.from_numpy(r), [len(r)], torch.ones(len(r), dtype=torch.int64), torch.ones(len(r), dtype=torch.bool),
                       torch.zeros(len(r)), torch.zeros(len(r)))  # fmt: skip
        second, best = np.sort(r)[-2:]
        theirs = np.zeros_like(r)
        theirs[r.argmax()] = best - second
        assert differs(pass_at_k.advantages(batch, k=len(r)), theirs) < EXACT


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_of_pkpo_but_for_k_over_g(k: int) -> None:
    """arXiv 2505.15201: Σ over subsets of i of (max_S − max_{S∖i}) / C(G, k): ours divides by the number of subsets
    with i."""
    r = np.random.default_rng(k).normal(size=6)
    total = np.zeros(6)
    for bits in range(64):
        chosen = [i for i in range(6) if bits >> i & 1]
        if len(chosen) == k:
            for i in chosen:
                total[i] += r[chosen].max() - r[[j for j in chosen if j != i]].max()
    batch = Scored(
        torch.from_numpy(r),
        [6],
        torch.ones(6, dtype=torch.int64),
        torch.ones(6, dtype=torch.bool),
        torch.zeros(6),
        torch.zeros(6),
    )
    assert differs(pass_at_k.advantages(batch, k) * k / 6, total / math.comb(6, k)) < EXACT


def test_remax_of_verl_without_penalties(case: Case) -> None:
    returns = np.cumsum(case.token_rewards(penalties=False)[:, ::-1], axis=1)[:, ::-1]
    theirs = (returns - 0.25) * case.mask
    batch = case.scored()
    assert differs(remax.advantages(batch), theirs[case.mask]) < EXACT


def test_remax_of_verl_with_penalties_is_the_tokens_return(case: Case) -> None:
    theirs = np.cumsum(case.token_rewards()[:, ::-1], axis=1)[:, ::-1] - 0.25
    assert differs(remax.advantages(case.scored(penalties=True)), theirs[case.mask]) < EXACT


# ---- REINFORCE++ and PPO -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalties", [False, True])
def test_reinforce_pp_baseline_of_verl(case: Case, penalties: bool) -> None:
    scores = case.token_rewards(penalties).sum(1)
    centred = scores - np.array([scores[case.index == g].mean() for g in range(len(SIZES))])[case.index]
    theirs = masked_whiten(np.repeat(centred[:, None], 9, axis=1), case.mask)
    assert differs(reinforce_pp.advantages(case.scored(penalties)), theirs[case.mask]) < EXACT


def test_reinforce_pp_of_verl_is_the_whitened_return(case: Case) -> None:
    returns, running = np.zeros_like(case.values), np.zeros(len(case.index))
    rewards = case.token_rewards()
    for t in reversed(range(9)):
        running = rewards[:, t] + running
        returns[:, t] = running
        running = running * case.mask[:, t]
    theirs = masked_whiten(returns, case.mask)
    assert differs(reinforce_pp.advantages(case.scored(penalties=True), baseline=False), theirs[case.mask]) < EXACT


def test_a_population_variance_as_in_openrlhf_differs_by_a_known_factor(case: Case) -> None:
    centred = case.outcomes - case.of_group(np.mean)
    theirs = masked_whiten(np.repeat(centred[:, None], 9, axis=1), case.mask, ddof=0)
    tokens = case.mask.sum()
    ours = reinforce_pp.advantages(case.scored())
    assert differs(ours, theirs[case.mask] * np.sqrt((tokens - 1) / tokens)) < 1e-7
    assert differs(ours, theirs[case.mask]) > 1e-4


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.99, 0.9)])
def test_gae_of_trl_and_verl_in_padded_rows(case: Case, gamma: float, lam: float) -> None:
    rewards, advantages = case.token_rewards(), np.zeros_like(case.values)
    following, running = np.zeros(len(case.index)), np.zeros(len(case.index))
    for t in reversed(range(9)):
        on = case.mask[:, t]
        delta = rewards[:, t] + gamma * following - case.values[:, t]
        running = np.where(on, delta + gamma * lam * running, running)
        following = np.where(on, case.values[:, t], following)
        advantages[:, t] = running
    ours, targets = gae.advantages(case.scored(penalties=True), gamma, lam)
    assert differs(targets, (advantages + case.values)[case.mask]) < EXACT
    assert differs(ours, masked_whiten(advantages, case.mask)[case.mask]) < EXACT
