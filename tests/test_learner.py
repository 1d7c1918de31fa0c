"""From scored rollouts to gradients: every part of an algorithm in its place, against sums written out by hand in
float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_rl.algo.declared import needs
from hybrid_rl.config import (
    AlgoConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    LayoutKind,
    OldLogprobs,
    OptimizerConfig,
    Reference,
    Schedule,
)
from hybrid_rl.learner import make_learner
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy.layout import pack
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.update import score
from hybrid_rl.rollout.collector import Batch
from hybrid_rl.session import Session
from hybrid_rl.types import Group, Task
from tests.policy.test_update import Recorder, rollouts
from tests.test_rl import session

REWARDS = [1.0, 0.0, 0.25, 0.5, 0.75, 0.0]
PART = "hybrid_rl.algo"


def part(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{PART}.{name}", **arguments}


def batch(seed: int = 0, near: Policy | None = None) -> Batch:
    """Two groups of three; recorded log-probabilities far from the policy's, or near them."""
    made = rollouts(seed)
    if near is not None:
        own = score(near, made, 1.0)
        noise = 0.1 * torch.randn(len(own), generator=torch.Generator().manual_seed(seed))
        recorded = iter((own + noise).clamp(max=0).tolist())
        for r in made:
            r.logprobs = np.array([next(recorded) if m else 0.0 for m in r.loss_mask], np.float32)
    for r, reward in zip(made, REWARDS, strict=True):
        r.finish("stop", "")
        r.score(reward, {"reward": reward})
    groups = [Group(g, Task(f"t{g}", ({"role": "user", "content": "?"},), ""), made[3 * g : 3 * g + 3]) for g in (0, 1)]
    return Batch(groups=groups)


@pytest.fixture
def learning(policy: Policy, tmp_path: Path):
    """make(algo) → a session with that algorithm; its scorer is closed at the end."""
    made: list[Session] = []

    def make(**algo: Any) -> Session:
        made.append(session(policy, tmp_path, "constant"))
        made[-1].config.algo = AlgoConfig(
            **{"advantage": part("mean_only.advantages"), "loss": part("reinforce.loss"), **algo}
        )
        return made[-1]

    yield make
    for s in made:
        s.scorer.close()


def gradient(
    s: Session, b: Batch, step: int = 1
) -> tuple[dict[str, Tensor], dict[str, float], dict[tuple[int, int], float]]:
    learner = make_learner(s, 0)
    learner.optimizer = recorder = Recorder(s.policy.model)  # type: ignore[assignment]
    numbers, advantages = learner.learn(b, step)
    return recorder.gradient, numbers, advantages


def by_hand(policy: Policy, b: Batch, weights: dict[tuple[int, int], list[float]]) -> dict[str, Tensor]:
    """Σ weight · ∇ log π over the tokens of each rollout named (group, index), from log-probabilities with a
    gradient."""
    total = torch.zeros(())
    for (group, index), of_tokens in weights.items():
        rollout = b.groups[group].rollouts[index]
        (row,) = pack([rollout], "padded", 2048)
        logprobs, _ = policy.logprobs(row, 1.0)
        total = total + (logprobs * torch.tensor(of_tokens)).sum()
    total.backward()
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return found


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert any(g.abs().max() > 1e-4 for g in theirs.values())
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=2e-4, atol=2e-6, msg=name)


def lengths(b: Batch) -> list[int]:
    return [r.sampled for r in b.rollouts]


def centred() -> list[float]:
    return [r - sum(REWARDS[g : g + 3]) / 3 for g in (0, 3) for r in REWARDS[g : g + 3]]


AGGREGATIONS = {
    "token_mean": lambda n, kept: 1 / sum(kept.values()),
    "seq_mean": lambda n, kept: 1 / (n * 6),  # rollouts of the batch, kept or not
    "fixed": lambda n, kept: 1 / (6 * 6),  # times the test session's rollout.max_tokens
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [(), (1,), (0, 4)])
def test_truncated_rollouts_leave_no_trace_but_in_their_groups_mean(learning, policy, aggregation, cut):
    """Advantages are of whole groups; the loss and its denominator see the rest alone."""
    b = batch()
    for i in cut:
        b.rollouts[i].finish_reason = "length"
    kept = {i: n for i, n in enumerate(lengths(b)) if i not in cut}
    weight = {i: -centred()[i] * AGGREGATIONS[aggregation](n, kept) for i, n in kept.items()}
    expected = by_hand(policy, b, {(i // 3, i % 3): [weight[i]] * n for i, n in kept.items()})
    mine, _, advantages = gradient(learning(aggregation=part(f"aggregation.{aggregation}"), mask_truncated=True), b)
    assert_same(mine, expected)
    assert [advantages[i // 3, i % 3] for i in range(6)] == pytest.approx(centred(), abs=1e-6)


BAND = {"old_logprobs": OldLogprobs.recomputed}
UNTRAINED = {  # why → algo, rewards, finish reasons
    "truncated": ({"mask_truncated": True}, REWARDS, ["length"] * 6),
    "corrected": ({**BAND, "correction": {"a": part("seq_mask.correct", low=3.0, high=4.0)}}, REWARDS, ["stop"] * 6),
    "corrected, by weights of 0": ({**BAND, "correction": {"a": part("icepop.correct", low=1e6, high=2e6)}}, REWARDS, ["stop"] * 6),
    "corrected, and the rest truncated": (
        {**BAND, "mask_truncated": True, "correction": {"a": part("seq_mask.correct", low=3.0, high=4.0)}}, REWARDS, ["length"] * 3 + ["stop"] * 3,
    ),
    "zero_gradient": ({}, [0.5] * 6, ["stop"] * 6),
}  # fmt: skip


@pytest.mark.parametrize("case", UNTRAINED)
def test_a_batch_that_trains_nothing_says_why_and_measures_nothing(learning, policy, case):
    b, (algo, rewards, reasons) = batch(near=policy), UNTRAINED[case]
    for r, reward, reason in zip(b.rollouts, rewards, reasons, strict=True):
        r.finish_reason = reason
        r.score(reward, {})
    before = [p.detach().clone() for p in policy.model.parameters()]
    learner = make_learner(learning(**algo), 0)
    numbers, _ = learner.learn(b, 1)
    assert all(torch.equal(a, p) for a, p in zip(before, policy.model.parameters(), strict=True))
    assert (numbers["nothing_trained"], numbers["trained"], b.trained) == (case.split(",")[0], 0, set())
    if case in ("truncated", "corrected"):
        assert numbers["loss"] is numbers["entropy"] is numbers["grad_norm"] is numbers["clip_fraction"] is None
        assert (numbers["mismatch_kl"] is None) == (case == "truncated"), (
            "recomputed log-probabilities tell it without an update"
        )


def test_what_an_update_used_is_noted_rollout_by_rollout(learning):
    """Of two groups one is cut but for a rollout; an update that is skipped uses none."""
    b = batch()
    for i in (3, 5):
        b.rollouts[i].finish_reason = "length"
    numbers, _ = make_learner(learning(mask_truncated=True, minibatches=2), 0).learn(b, 1)
    assert b.trained == {(0, 0), (0, 1), (0, 2), (1, 1)}
    assert (numbers["trained"], numbers["nothing_trained"]) == (4, None)
    b = batch()
    numbers, _ = make_learner(learning(loss={"_target_": "tests.broken.loss", "rollout": 4}), 0).learn(b, 1)
    assert (b.trained, numbers["trained"], numbers["nothing_trained"]) == (set(), 0, "not_finite")


@pytest.mark.parametrize("schedule", [Schedule.linear, Schedule.cosine])
def test_the_learning_rate_follows_the_steps_of_the_run(learning, schedule):
    """Steps without a signal, minibatches without a token, and a learner made anew after any step change no rate."""
    optimizer = OptimizerConfig(lr=1e-3, schedule=schedule, warmup_steps=3, final_lr=0.25)

    def rates(empty: set[int], resumed: bool = False) -> list[float]:
        s = learning(minibatches=2)
        s.config.rl.steps, s.config.rl.optimizer = 6, optimizer
        learner, found = make_learner(s, 0), []
        for step in range(1, 7):
            b = Batch(silent_groups=2) if step in empty else batch()
            found.append(learner.learn(b, step)[0]["lr"])
            if resumed:
                learner = make_learner(s, step)
        return found

    whole = rates(set())
    plain = Optimizer({"p": torch.nn.Parameter(torch.zeros(1))}, optimizer, 12, 1)
    of_updates = [plain.step().lr for _ in range(12)]
    assert whole == pytest.approx([(a + b) / 2 for a, b in zip(of_updates[::2], of_updates[1::2], strict=True)])
    assert whole == rates(set(), resumed=True)
    for empty in ({1}, {2, 3, 4}, {5}):
        assert [r for i, r in enumerate(rates(empty, resumed=True), 1) if i not in empty] == [
            r for i, r in enumerate(whole, 1) if i not in empty
        ]
    assert rates({6})[5] == of_updates[10]
    assert of_updates[11] == 2.5e-4


def test_corrections_multiply_and_drop_together(learning, policy):
    """tis caps the weight of a token; seq_mask drops whole rollouts, from the denominator too. Old log-probabilities
    are the trainer's."""
    b = batch(near=policy)
    b.rollouts[2].logprobs = b.rollouts[2].logprobs - b.rollouts[2].loss_mask.astype(np.float32)
    own = score(policy, b.rollouts, 1.0)
    behaviour = torch.tensor([lp for r in b.rollouts for lp, m in zip(r.logprobs, r.loss_mask, strict=True) if m])
    ratios = [w.tolist() for w in (own - behaviour).exp().split(lengths(b))]
    geometric = [math.exp(sum(map(math.log, w)) / len(w)) for w in ratios]
    kept = [i for i in range(6) if 0.8 <= geometric[i] <= 1.3]
    assert 2 not in kept
    assert len(kept) >= 4
    count = sum(lengths(b)[i] for i in kept)
    weights = {(i // 3, i % 3): [-centred()[i] * min(w, 1.05) / count for w in ratios[i]] for i in kept}
    correction = {"tis": part("tis.correct", cap=1.05), "mask": part("seq_mask.correct", low=0.8, high=1.3)}
    s = learning(correction=correction, old_logprobs=OldLogprobs.recomputed)
    mine, numbers, _ = gradient(s, b)
    assert_same(mine, by_hand(policy, b, weights))
    assert numbers["dropped"] == pytest.approx(1 - count / sum(lengths(b)))
    everything = sorted(w for of_rollout in ratios for w in of_rollout)
    assert numbers["correction_max"] == pytest.approx(everything[-1], rel=1e-5)  # raw: before the cap
    assert everything[-1] > 1.05


def test_recomputed_log_probabilities_make_the_first_ratio_one_to_the_bit(learning, policy):
    s = learning(old_logprobs=OldLogprobs.recomputed, loss=part("ppo_clip.loss"))
    _, numbers, _ = gradient(s, batch())
    assert numbers["ratio_p01"] == numbers["ratio_max"] == 1.0
    assert numbers["clip_fraction"] == 0
    assert numbers["mismatch_kl"] > 0.01  # the engine's were far off, and that is still told
    _, numbers, _ = gradient(learning(loss=part("ppo_clip.loss")), batch())
    assert numbers["ratio_max"] > 1.5


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_epochs_and_minibatches_are_optimizer_steps(learning, epochs, minibatches):
    learner = make_learner(learning(epochs=epochs, minibatches=minibatches), 0)
    assert learner.optimizer.total_steps == learner.config.rl.steps * epochs * minibatches
    numbers, _ = learner.learn(batch(), 1)
    assert learner.optimizer.steps == epochs * minibatches
    spread = numbers["ratio_max"] - numbers["ratio_p01"]
    assert spread > 0


def test_kl_in_the_reward_is_part_of_the_advantage(learning, policy, tmp_path):
    """Σ over its tokens of −coef · k1(π_old, reference) is added to a rollout's reward before groups are compared."""
    s = learning(reference=Reference.frozen, kl=KlConfig(coef=0.5, estimator=KlEstimator.k1, place=KlPlace.reward))
    learner = make_learner(s, 0)  # the reference is the policy as it is now
    b = batch()
    distant = score(policy, b.rollouts, 1.0)
    behaviour = torch.tensor([lp for r in b.rollouts for lp, m in zip(r.logprobs, r.loss_mask, strict=True) if m])
    cost = [0.5 * float(x.sum()) for x in (behaviour - distant).split(lengths(b))]
    paid = [r - c for r, c in zip(REWARDS, cost, strict=True)]
    expected = [r - sum(paid[g : g + 3]) / 3 for g in (0, 3) for r in paid[g : g + 3]]
    learner.optimizer = Recorder(policy.model)  # type: ignore[assignment]
    _, advantages = learner.learn(b, 1)
    assert [advantages[i // 3, i % 3] for i in range(6)] == pytest.approx(expected, abs=1e-4)
    assert max(cost) > 0.5


def test_the_adaptive_coefficient_moves_toward_its_target_and_is_saved(learning):
    s = learning(reference=Reference.frozen, minibatches=2, kl=KlConfig(coef=0.1, target=1e-9, horizon=10))
    s.config.rl.optimizer.lr = 1e-2
    learner = make_learner(s, 0)
    numbers, _ = learner.learn(batch(), 1)
    assert numbers["kl_coef"] == 0.1
    assert numbers["reference_kl"] > 1e-9
    assert learner.kl_coef == pytest.approx(0.1 * (1 + 0.2 / 10))
    other = make_learner(s, 0)
    other.restore(learner.state())
    assert other.kl_coef == learner.kl_coef


@pytest.mark.parametrize("estimator", [KlEstimator.k2, KlEstimator.k3])
@pytest.mark.parametrize(("unbiased", "minibatches"), [(None, 1), (None, 2), (True, 1), (False, 2)])
def test_kl_in_the_loss_is_unbiased_where_a_batch_takes_several_updates(
    learning, policy, estimator, unbiased, minibatches
):
    """Of the first minibatch: coef / N · Σ (1 − e^d) or −d of a token as it stands, or ρ · (−d), which is both
    estimators' unbiased form."""
    s = learning(reference=Reference.frozen, minibatches=minibatches, kl=KlConfig(coef=0.5, estimator=estimator, unbiased=unbiased),
                 advantage=part("mean_only.advantages"))  # fmt: skip
    learner, b = make_learner(s, 0), batch()
    with torch.no_grad():
        for p in policy.model.parameters():  # away from the reference
            p.mul_(0.97)
    for r in b.rollouts:
        r.score(0.0, {})  # no advantage: the KL alone pulls
    first = b.rollouts[: 6 // minibatches]
    own, distant = score(policy, first, 1.0), score(learner.roles.reference.model, first, 1.0)
    behaviour = torch.tensor([lp for r in first for lp, m in zip(r.logprobs, r.loss_mask, strict=True) if m])
    d = distant - own
    weighted = minibatches > 1 if unbiased is None else unbiased
    slope = (own - behaviour).exp() * -d if weighted else -d if estimator == KlEstimator.k2 else 1 - d.exp()
    pulls = (0.5 * slope / len(d)).split([r.sampled for r in first])
    expected = by_hand(policy, b, {(i // 3, i % 3): pulls[i].tolist() for i in range(len(first))})
    learner.optimizer = recorder = Recorder(policy.model)  # type: ignore[assignment]
    learner.learn(Batch(groups=b.groups[: 2 // minibatches]), 1)
    assert_same(recorder.gradient, expected)


def test_parts_of_the_reward_reach_the_advantage(learning):
    """0 where a reward lacks the part; groups of equal sums differ by them."""
    b = batch()
    for r, (right, form) in zip(b.rollouts, [(1, 0), (1, 0), (0, 1), (0.5, 0.5), (1, 0), (0, 1)], strict=True):
        r.score(1.0, {"right": right, "form": form} if form else {"right": right})
    seen = []
    learner = make_learner(learning(advantage=part("gdpo.advantages")), 0)
    learner.parts.advantages, plain = (lambda scored: seen.append(scored) or plain(scored)), learner.parts.advantages
    learner.learn(b, 1)
    assert {name: column.tolist() for name, column in seen[0].parts.items()} == {
        "right": [1, 1, 0, 0.5, 1, 0],
        "form": [0, 0, 1, 0.5, 0, 1],
    }


@pytest.mark.parametrize("rows", [("trees", 2048), ("packed", 40), ("padded", 24)])
@pytest.mark.parametrize("kind", ["top_entropy", "opsm", "kl_cov"])
def test_a_look_at_the_whole_minibatch_does_not_depend_on_rows(learning, policy, kind, rows):
    """Against sums by hand: which tokens are chosen is found from plain log-probabilities and entropies of all of
    them."""
    b = batch()
    s = learning(
        selection={}
        if kind == "kl_cov"
        else {kind: part(f"{kind}.select", **({"share": 0.3} if kind == "top_entropy" else {"delta": 0.1}))},
        **({"loss": part("kl_cov.loss", share=0.2, coef=0.7)} if kind == "kl_cov" else {}),
    )
    policy.settings.layout, policy.settings.row_tokens = LayoutKind(rows[0]), rows[1]
    with torch.no_grad():
        found = [policy.logprobs(pack([r], "padded", 2048)[0], 1.0) for r in b.rollouts]
    logprobs, entropy = torch.cat([f[0] for f in found]).double(), torch.cat([f[1] for f in found]).double()
    behaviour = torch.tensor(
        [lp for r in b.rollouts for lp, m in zip(r.logprobs, r.loss_mask, strict=True) if m], dtype=torch.float64
    )
    advantages = torch.tensor(
        [a for a, n in zip(centred(), lengths(b), strict=True) for _ in range(n)], dtype=torch.float64
    )
    if kind == "top_entropy":
        chosen = entropy >= entropy.quantile(0.7)
    elif kind == "opsm":
        left = torch.cat([x.mean().expand(len(x)) for x in (behaviour - logprobs).split(lengths(b))])
        chosen = ~((advantages < 0) & (left > 0.1))
    else:
        covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
        chosen = covariance >= covariance.topk(int(0.2 * len(covariance))).values[-1]
    assert 0 < chosen.sum() < len(chosen)
    slope = -advantages * chosen
    if kind == "kl_cov":
        moved = logprobs - behaviour
        slope = -moved.exp() * advantages + 0.7 * chosen * moved.sign()
    pulls = (slope / len(slope)).split(lengths(b))
    mine, numbers, _ = gradient(s, b)
    assert_same(mine, by_hand(policy, b, {(i // 3, i % 3): pulls[i].tolist() for i in range(6)}))
    share = float(chosen.float().mean())
    assert numbers["covariant" if kind == "kl_cov" else "selected"] == pytest.approx(share, abs=1e-6)


def test_an_entropy_bonus_flattens_the_distribution(learning, policy):
    """Its gradient against one by finite differences of the mean entropy."""
    b = batch()
    plain, _, _ = gradient(learning(), b)
    bonus, _, _ = gradient(learning(entropy_coef=0.5), b)
    name = "model.layers.0.mlp.down_proj.weight"
    parameter = dict(policy.model.named_parameters())[name]
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))

    def entropy() -> float:
        with torch.no_grad():
            return float(
                torch.cat([policy.logprobs(row, 1.0)[1] for row in pack(b.rollouts, "trees", 2048)]).double().mean()
            )

    h = 1e-3
    with torch.no_grad():
        parameter += h * direction
        up = entropy()
        parameter -= 2 * h * direction
        down = entropy()
        parameter += h * direction
    measured = (up - down) / (2 * h)
    analytic = float(((plain[name] - bonus[name]) * direction).sum()) / 0.5
    assert abs(measured) > 1e-3
    assert analytic == pytest.approx(measured, rel=0.02)


def test_the_teachers_opinion_is_the_advantage(learning, policy, tmp_path):
    """Of another model; its tokenizer must be the policy's."""
    teacher = tmp_path / "teacher"
    with torch.no_grad():
        kept = [p.clone() for p in policy.model.parameters()]
        for p in policy.model.parameters():
            p.mul_(0.9)
        policy.export(teacher)
        b = batch()
        theirs = score(policy, b.rollouts, 1.0)
        for p, old in zip(policy.model.parameters(), kept, strict=True):
            p.copy_(old)
    behaviour = torch.tensor([lp for r in b.rollouts for lp, m in zip(r.logprobs, r.loss_mask, strict=True) if m])
    s = learning(advantage=part("opd.advantages"), teacher=str(teacher), silent_by="none")
    mine, _, _ = gradient(s, b)
    wanted = [(x / len(behaviour)).tolist() for x in (theirs - behaviour).split(lengths(b))]
    assert_same(mine, by_hand(policy, b, {(i // 3, i % 3): [-w for w in wanted[i]] for i in range(6)}))

    tokenizer = teacher / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("</reversed_text>", "</reversed_test>"))
    with pytest.raises(ModelError, match=r"algo\.teacher=.*its tokenizer is not the policy's"):
        make_learner(s, 0)


def test_needs_are_found_in_nested_parts():
    assert needs(part("grpo.advantages")) <= {"group"}
    assert "values" in needs(part("gae.advantages"))
    assert needs(part("opd.advantages", reward=part("remax.advantages", _partial_=True))) >= {
        "teacher_logprobs",
        "greedy",
    }


# ---- through the loop -------------------------------------------------------------------------------------------------


def test_what_the_update_saw_of_each_token_is_kept(learning, policy: Policy, reference_of) -> None:
    """Log-ratios and entropies of every sampled token as plain transformers computes them in float64."""
    b, plain = batch(near=policy), reference_of(policy.folder)
    expected = {}
    for r in b.rollouts:
        start, ids = r.prompt_length, r.token_ids
        rows = plain.distribution(ids, 1.0)[start - 1 : -1]
        old = torch.tensor(r.logprobs[start:], dtype=torch.float64)
        moved = rows.gather(-1, torch.tensor(ids[start:])[:, None])[:, 0] - old
        expected[r.group_id, r.index] = {"log_ratios": moved, "entropies": -(rows.exp() * rows).sum(-1)}
    gradient(learning(), b)
    assert b.tokens.keys() == expected.keys()
    for key, columns in expected.items():
        mask = next(r.loss_mask for r in b.rollouts if (r.group_id, r.index) == key)
        chosen = torch.tensor(mask[-len(columns["entropies"]) :])
        assert b.tokens[key].keys() == columns.keys()  # one advantage for the whole rollout
        for name, column in columns.items():
            torch.testing.assert_close(torch.tensor(b.tokens[key][name]).double(), column[chosen], atol=1e-5, rtol=1e-4)


def test_advantages_of_tokens_are_kept_if_they_differ(learning) -> None:
    b = batch()
    gradient(learning(advantage=part("reinforce_pp.advantages")), b)
    assert all("advantages" not in columns for columns in b.tokens.values())
    s = learning(
        reference=Reference.frozen, kl=KlConfig(coef=0.1, place=KlPlace.reward), advantage=part("gae.advantages")
    )
    gradient(s, other := batch())
    assert all(len(other.tokens[r.group_id, r.index]["advantages"]) == r.sampled for r in other.rollouts)
