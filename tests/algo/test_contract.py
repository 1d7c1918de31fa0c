"""Every part is called on a made-up batch before anything loads, and answers for its contract by name."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybrid_rl.algo.contract import PartError, check_parts
from hybrid_rl.algo.declared import removed_signal
from hybrid_rl.preflight.settings import CONF, load

HEAD = "import torch\nfrom hybrid_rl.algo import grpo, gae, ppo_clip\n"
DETACHED = "def loss(tokens):\n    return (tokens.logprobs * tokens.advantages).detach(), {}"

# what the part is, its file, and what the line must hold
BROKEN = [
    ("advantage", "def advantages(batch):\n    return batch.outcomes[:3]", "[3] float32 where [48] or [120] float is due; an advantage returns a float tensor"),
    ("advantage", "def advantages(batch):\n    return (batch.outcomes > 0.5).long()", "[48] int64 where"),
    ("advantage", "def advantages(batch):\n    return batch.outcomes / 0", "returns with NaN or infinite numbers"),
    ("advantage", "def advantages(batch):\n    return batch.outcomes.tolist()", "a list where"),
    ("advantage", "def advantages(batch):\n    pass", "returns nothing where"),
    ("advantage", "def advantages(batch):\n    return batch.rewards[999]", "raises IndexError: index 999 is out of bounds for dimension 0 with size 48 ("),
    ("advantage", "def advantages(batch):\n    return batch.outcomes - batch.values.mean()", "raises AttributeError: 'NoneType' object has no attribute 'mean' ("),
    ("advantage", "NEEDS = ('values',)\ndef advantages(batch):\n    return batch.values", "its NEEDS names values; an advantage returns"),
    ("advantage", "def advantages(batch):\n    return batch.old_logprobs, batch.old_logprobs", "and its NEEDS does not name values"),
    ("advantage", "NEEDS = ('values',)\ndef advantages(batch):\n    return batch.values, batch.outcomes", "returns targets [48] float32 where [120] float is due"),
    ("advantage", "def advantages(batch):\n    return batch.outcomes.requires_grad_()", "with a gradient"),
    ("advantage", "1 +", "is not Python"),
    ("advantage", "import no_such_module\ndef advantages(batch):\n    return batch.outcomes", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
    ("loss", DETACHED, "gives tokens.logprobs no gradient; a loss returns (losses [M], {name: [M]})"),
    ("loss", "def loss(tokens):\n    return 0 * tokens.logprobs, {}", "gives tokens.logprobs no gradient"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * tokens.advantages", "returns [120] float32; a loss returns"),
    ("loss", "def loss(tokens):\n    return (-tokens.logprobs * tokens.advantages).mean(), {}", "returns losses [] float32 where [120] float is due"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * tokens.advantages, {'mean': tokens.logprobs.mean()}", "returns 'mean' [] float32 where"),
    ("loss", "def loss(tokens):\n    return (tokens.logprobs - 9).sqrt(), {}", "returns losses with NaN or infinite numbers"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * (tokens.advantages - tokens.advantages.mean()), {}", "gives a token another loss when other rollouts share its row"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * tokens.advantages / tokens.advantages.abs().max(), {}", "raises "),  # a row without a token
    ("loss", "def look(minibatch):\n    return minibatch.entropy[:2]\ndef loss(tokens):\n    return -tokens.logprobs * tokens.look, {}", "own_part.look) returns [2] float32 where [120] number is due; a look returns"),
    ("correction.own", "def correct(batch):\n    return torch.ones_like(batch.old_logprobs)", "returns [120] float32; a correction returns (weights [N] float, kept [N] bool)"),
    ("correction.own", "def correct(batch):\n    return torch.ones_like(batch.old_logprobs), torch.ones_like(batch.old_logprobs)", "returns kept [120] float32 where [120] bool is due"),
    ("selection.own", "def select(minibatch):\n    return minibatch.entropy.mean()", "returns [] float32 where [120] number is due; a selection returns"),
    ("aggregation", "def aggregate(kept, rollout, max_tokens):\n    return kept.float(), 0", "returns the divisor 0; an aggregation returns"),
    ("aggregation", "def aggregate(kept, rollout, max_tokens):\n    return kept.float()", "returns [120] float32; an aggregation returns"),
]  # fmt: skip


def composed(monkeypatch, folder: Path, kind: str, source: str, *overrides: str):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(__import__("sys").modules, "own_part", raising=False)
    (folder / "own_part.py").write_text(HEAD + source)
    name = {"advantage": "advantages", "loss": "loss", "aggregation": "aggregate"}.get(
        kind, "correct" if "correction" in kind else "select"
    )
    plus = "+" if "." in kind else ""
    return load(["+recipe=reverse", f"{plus}algo.{kind}={{_target_:own_part.{name}}}", *overrides])


@pytest.mark.parametrize(("kind", "source", "expected"), BROKEN, ids=lambda value: value[:60])
def test_a_broken_part_is_named_with_its_contract(kind, source, expected, tmp_path, monkeypatch) -> None:
    more = ["algo.old_logprobs=recomputed"] if "correction" in kind else []
    with pytest.raises(ValueError, match=rf"algo\.{kind}") as caught:
        check_parts(OmegaConf.to_object(composed(monkeypatch, tmp_path, kind, source, *more)))
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert "own_part" in message


def test_the_line_of_the_part_that_raised_is_named(tmp_path, monkeypatch) -> None:
    with pytest.raises(PartError, match=r"own_part\.py:4\)"):
        check_parts(OmegaConf.to_object(composed(monkeypatch, tmp_path, "advantage", "def advantages(batch):\n    raise KeyError('x')")))


PLACE = """
NEEDS = ("group",)

def advantages(batch, power: float = 1.0):
    def of_group(rewards):
        below, above = (rewards[:, None] > rewards).sum(1), (rewards[:, None] < rewards).sum(1)
        place = (below - above) / max(1, len(rewards) - 1)
        return place.sign() * place.abs() ** power

    return batch.per_group(of_group)
"""
FINE = [
    ("advantage", PLACE),
    ("advantage", "NEEDS = ('values',)\ndef advantages(batch):\n    return gae.advantages(batch)"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * tokens.advantages, {'up': tokens.advantages > 0}"),
    ("loss", "def look(minibatch):\n    return minibatch.advantages - minibatch.advantages.mean()\n"
             "def loss(tokens):\n    return -tokens.logprobs * tokens.look, {}"),
    ("selection.own", "def select(minibatch):\n    return minibatch.entropy > minibatch.entropy.median()"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), FINE)
def test_a_part_that_keeps_its_contract_is_taken(kind, source, tmp_path, monkeypatch) -> None:
    check_parts(OmegaConf.to_object(composed(monkeypatch, tmp_path, kind, source)))


ALGORITHMS = sorted(path.stem for path in (CONF / "algo").glob("*.yaml"))
PARTS = [f"algo/{kind}={path.stem}" for kind in ("advantage", "loss", "aggregation", "correction", "selection")
         for path in sorted((CONF / "algo" / kind).glob("*.yaml"))]  # fmt: skip


@pytest.mark.parametrize("choice", [*(f"algo={name}" for name in ALGORITHMS), *PARTS])
@pytest.mark.parametrize("size", [1, 4])
def test_every_part_that_comes_along_keeps_its_contract(choice: str, size: int, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    more = ["algo.silent_by=none", "algo.old_logprobs=recomputed", "algo.advantage.eps=1e-6"] if False else ["algo.old_logprobs=recomputed"]
    if "opd" in choice:
        more.append(f"algo.teacher={tmp_path}")
    if size == 1:
        alone = ["algo=ppo", "algo=remax", "algo=opd", "algo/advantage=gae", "algo/advantage=vtrace"]
        if choice not in alone:
            return
        more.append("algo.silent_by=none")
    check_parts(OmegaConf.to_object(load(["+recipe=reverse", choice, f"rollout.group_size={size}", *more])))


KL_IN_THE_REWARD = ["algo.reference=frozen", "algo.kl.coef=0.1", "algo.kl.place=reward"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo=ppo", "algo/loss=gspo"],
        ["algo=ppo", "algo/loss=gmpo"],
        ["algo=remax", "algo/loss=gspo", *KL_IN_THE_REWARD],
        ["algo=gspo", "algo/advantage=reinforce_pp", "algo.advantage.baseline=false", *KL_IN_THE_REWARD],
    ],
)
def test_one_ratio_a_rollout_needs_one_advantage_a_rollout(overrides: list[str]) -> None:
    with pytest.raises(
        PartError, match=r"algo\.loss \(.*\) has one ratio a rollout and would average the tokens' own advantages of algo\.advantage"
    ):
        check_parts(OmegaConf.to_object(load(["+recipe=reverse", *overrides])))
    if KL_IN_THE_REWARD[0] in overrides:  # without penalties the tokens of a rollout are alike
        check_parts(OmegaConf.to_object(load(["+recipe=reverse", *(o for o in overrides if o not in KL_IN_THE_REWARD)])))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["algo=ppo"], None),
        (["algo=ppo", "algo.silent_by=outcome"], "gae.advantages a signal; use algo.silent_by=none"),
        (["algo/advantage=remax"], "remax.advantages a signal; use algo.silent_by=none"),
        (["algo=gdpo"], None),
        (["algo=gdpo", "algo.silent_by=none"], None),
        (["algo=gdpo", "algo.silent_by=reward"], "gdpo.advantages a signal; use algo.silent_by=parts"),
    ],
)
def test_a_signal_in_groups_that_would_be_replaced_is_told(overrides, expected) -> None:
    algo = load(["+recipe=reverse", *overrides]).algo
    found = removed_signal(algo.advantage, algo.silent_by)
    assert found is None if expected is None else expected in str(found)
