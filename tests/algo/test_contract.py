"""Every part is called on a made-up batch before anything loads, and answers for its contract by name."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rl.algo.contract import check_parts
from hybrid_rl.algo.declared import PartError, removed_signal
from hybrid_rl.config import AlgoConfig, Config, KlConfig, KlPlace
from hybrid_rl.preflight.settings import CONF

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
    ("advantage", "1 +", "cannot be loaded: SyntaxError"),
    ("advantage", "import no_such_module\ndef advantages(batch):\n    return batch.outcomes", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
    ("loss", DETACHED, "gives tokens.logprobs no gradient; a loss returns (losses [M], {name: [M]})"),
    ("loss", "def loss(tokens):\n    return 0 * tokens.logprobs, {}", "gives tokens.logprobs no gradient"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * tokens.advantages", "returns [120] float32; a loss returns"),
    ("loss", "def loss(tokens):\n    return (-tokens.logprobs * tokens.advantages).mean(), {}", "returns losses [] float32 where [120] float is due"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * tokens.advantages, {'mean': tokens.logprobs.mean()}", "returns 'mean' [] float32 where"),
    ("loss", "def loss(tokens):\n    return (tokens.logprobs - 9).sqrt(), {}", "returns losses with NaN or infinite numbers"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * (tokens.advantages - tokens.advantages.mean()), {}", "gives a token another loss when other rollouts share its row"),
    ("loss", "def loss(tokens):\n    return -tokens.logprobs * tokens.advantages + 0 * float(tokens.advantages[0]), {}", "raises IndexError: index 0 is out of bounds"),  # a row without a token
    ("loss", "def look(minibatch):\n    return minibatch.entropy[:2]\ndef loss(tokens):\n    return -tokens.logprobs * tokens.look, {}", "own_part.look) returns [2] float32 where [120] number is due; a look returns"),
    ("correction", "def correct(batch):\n    return torch.ones_like(batch.old_logprobs)", "returns [120] float32; a correction returns (weights [N] float, kept [N] bool)"),
    ("correction", "def correct(batch):\n    return torch.ones_like(batch.old_logprobs), torch.ones_like(batch.old_logprobs)", "returns kept [120] float32 where [120] bool is due"),
    ("selection", "def select(minibatch):\n    return minibatch.entropy.mean()", "returns [] float32 where [120] number is due; a selection returns"),
    ("aggregation", "def aggregate(kept, rollout, max_tokens):\n    return kept.float(), 0", "returns the divisor 0; an aggregation returns"),
    ("aggregation", "def aggregate(kept, rollout, max_tokens):\n    return kept.float()", "returns [120] float32; an aggregation returns"),
]  # fmt: skip


def own(monkeypatch, folder: Path, kind: str, source: str) -> Config:
    """The default algorithm with this part of the user's own."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "own_part", sys)  # so that what is imported here is gone after the test
    monkeypatch.delitem(sys.modules, "own_part")
    (folder / "own_part.py").write_text(HEAD + source)
    name = {
        "advantage": "advantages",
        "loss": "loss",
        "aggregation": "aggregate",
        "correction": "correct",
        "selection": "select",
    }[kind]
    part = {"_target_": f"own_part.{name}"}
    return Config(algo=AlgoConfig(**{kind: {"own": part} if kind in ("correction", "selection") else part}))


@pytest.mark.parametrize(("kind", "source", "expected"), BROKEN, ids=lambda value: value[:60])
def test_a_broken_part_is_named_with_its_contract(kind, source, expected, tmp_path, monkeypatch) -> None:
    with pytest.raises(PartError, match=rf"algo\.{kind}") as caught:
        check_parts(own(monkeypatch, tmp_path, kind, source))
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert "own_part" in message


def test_the_line_of_the_part_that_raised_is_named(tmp_path, monkeypatch) -> None:
    with pytest.raises(PartError, match=r"own_part\.py:4\)"):
        check_parts(own(monkeypatch, tmp_path, "advantage", "def advantages(batch):\n    raise KeyError('x')"))


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
    ("selection", "def select(minibatch):\n    return minibatch.entropy > minibatch.entropy.median()"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), FINE)
def test_a_part_that_keeps_its_contract_is_taken(kind, source, tmp_path, monkeypatch) -> None:
    check_parts(own(monkeypatch, tmp_path, kind, source))


def option(kind: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / "algo" / kind / f"{name}.yaml").read_text())


def chosen(algorithm: str, **algo: Any) -> Config:
    """An algorithm of conf/algo, as Hydra composes it, with other settings or parts."""
    text = yaml.safe_load((CONF / "algo" / f"{algorithm}.yaml").read_text())
    parts = {kind: option(kind, name) if name else {} for entry in text.pop("defaults") for kind, name in entry.items()}
    config = Config(algo=AlgoConfig(**{**parts, **text, **algo}))
    config.rollout.group_size = 4
    return config


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "algo").glob("*.yaml")))
def test_every_algorithm_that_comes_along_keeps_its_contract(name: str) -> None:
    check_parts(chosen(name))


KINDS = ("advantage", "loss", "aggregation", "correction", "selection")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, path.stem) for kind in KINDS for path in sorted((CONF / "algo" / kind).glob("*.yaml"))]
)
def test_every_part_that_comes_along_keeps_its_contract(kind: str, name: str) -> None:
    check_parts(chosen("grpo", **{kind: option(kind, name)}))


@pytest.mark.parametrize("name", ["ppo", "remax", "opd"])
def test_a_group_may_be_one_rollout(name: str) -> None:
    config = chosen(name)
    config.rollout.group_size = 1
    check_parts(config)


def test_an_advantage_that_compares_nothing_is_told(tmp_path, monkeypatch) -> None:
    config = own(monkeypatch, tmp_path, "advantage", PLACE)
    config.rollout.group_size = 1
    with pytest.raises(
        PartError, match=r"is 0 for rollouts of unlike rewards, so that nothing would be trained: rollout\.group_size=1"
    ):
        check_parts(config)


IN_REWARD = KlConfig(coef=0.1, place=KlPlace.reward)


@pytest.mark.parametrize(
    ("config", "without"),
    [
        (chosen("ppo", loss=option("loss", "gspo")), None),
        (chosen("ppo", loss=option("loss", "gmpo")), None),
        (chosen("remax", loss=option("loss", "gspo"), kl=IN_REWARD), chosen("remax", loss=option("loss", "gspo"))),
        (chosen("gspo", advantage=(returns := {**option("advantage", "reinforce_pp"), "baseline": False}), kl=IN_REWARD),
         chosen("gspo", advantage=returns)),
    ],
)  # fmt: skip
def test_one_ratio_a_rollout_needs_one_advantage_a_rollout(config: Config, without: Config | None) -> None:
    with pytest.raises(
        PartError,
        match=r"algo\.loss \(.*\) has one ratio a rollout and would average the tokens' own advantages of algo\.advantage",
    ):
        check_parts(config)
    if without:  # without penalties the tokens of a rollout are alike
        check_parts(without)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (chosen("grpo"), None),
        (chosen("ppo"), None),
        (chosen("ppo", silent_by="outcome"), "gae.advantages a signal; use algo.silent_by=none"),
        (chosen("grpo", advantage=option("advantage", "remax")), "remax.advantages a signal; use algo.silent_by=none"),
        (chosen("gdpo"), None),
        (chosen("gdpo", silent_by="none"), None),
        (chosen("gdpo", silent_by="reward"), "gdpo.advantages a signal; use algo.silent_by=parts"),
    ],
)
def test_a_signal_in_groups_that_would_be_replaced_is_told(config: Config, expected: str | None) -> None:
    found = removed_signal(config.algo.advantage, config.algo.silent_by)
    assert found is None if expected is None else expected in str(found)
