"""A reward model's scores against plain transformers, one conversation at a time, and how they are paid."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from hybrid_rl.config import RewardModelConfig
from hybrid_rl.engine.base import KV_CACHE, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy import tiny
from hybrid_rl.policy.reward_model import RewardModel, check_reward_model
from hybrid_rl.rollout.generate import Generator
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.types import Group, Rollout, Task

CPU = torch.device("cpu")


def make(folder: Path, labels: int = 1, pad: bool = True, template: bool = True) -> Path:
    tokenizer = tiny.character_tokenizer([])
    if not template:
        tokenizer.chat_template = None
    torch.manual_seed(3)
    model = Qwen3ForSequenceClassification(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=80, initializer_range=0.2, num_labels=labels,
            pad_token_id=tokenizer.pad_token_id if pad else None, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answered(*completions: str) -> list[tuple[Group, Rollout]]:
    found = []
    for i, completion in enumerate(completions):
        task = Task(f"t{i}", ({"role": "user", "content": "q" * (i + 1)},), "")
        rollout = Rollout(task.id, i, 0, 0, [1])
        rollout.finish("stop", completion)
        rollout.score(0.25, {"own": 0.25})
        found.append((Group(i, task, [rollout]), rollout))
    return found


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize(("pad", "batch_tokens"), [(True, 200), (False, 200), (True, 1)])
def test_scores_are_those_of_each_conversation_alone(tmp_path, pad, batch_tokens, template):
    folder = make(tmp_path, pad=pad, template=template)
    own = RewardModel(RewardModelConfig(path=str(folder), weight=2.0, batch_tokens=batch_tokens), CPU)
    rollouts = answered("a", "a long answer", "", "another", "a")
    own.pay(rollouts)
    exact = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    for group, rollout in rollouts:
        question = group.task.messages[0]["content"]
        text = f"<|im_start|>user\n{question}<|im_end|><|im_start|>assistant\n{rollout.completion}<|im_end|>"
        ids = own.tokenizer(text if template else question + rollout.completion, add_special_tokens=False)["input_ids"]
        score = exact(torch.tensor([ids])).logits.item()
        assert rollout.reward == rollout.outcome == pytest.approx(0.25 + 2 * score, abs=1e-4)
        assert rollout.reward_parts == {"own": 0.25, "reward_model": pytest.approx(2 * score, abs=1e-4)}


def test_what_cannot_be_scored_has_no_reward(tmp_path):
    own = RewardModel(RewardModelConfig(path=str(make(tmp_path)), weight=0.0), CPU)
    rollouts = answered("a", "x" * 100, "failed", "own")
    failed, doubled = rollouts[2][1], rollouts[3][1]
    failed.reward = failed.outcome = None
    failed.error = "ValueError: no"
    doubled.score(0.5, {}, {"reward_model": 1.0})
    own.pay(rollouts)
    paid, long = rollouts[0][1], rollouts[1][1]
    assert (paid.reward, paid.reward_parts, list(paid.measures)) == (0.25, {"own": 0.25}, ["reward_model"])
    assert long.error is not None
    assert long.error.endswith("tokens, and the reward model takes 80")
    assert (long.reward, long.outcome, long.fault) == (None, None, "reward model")
    assert failed.error == "ValueError: no"
    assert doubled.error is not None
    assert "a part or measure reward_model" in doubled.error
    with torch.no_grad():
        own.model.score.weight[0, 0] = math.nan
    again = answered("a")
    own.pay(again)
    assert again[0][1].error == "the reward model's score is nan"


def test_another_model_is_refused_in_one_line(tmp_path, tiny_folder):
    with pytest.raises(
        ModelError, match=r"^reward_model.path=.* is no sequence classifier: its files have no score.weight; name"
    ):
        check_reward_model(tiny_folder)
    with pytest.raises(ModelError, match=r"^reward_model.path=.* has 3 labels; a reward model has one, its score$"):
        check_reward_model(make(tmp_path / "three", labels=3))
    folder = make(tmp_path / "torn")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"^reward_model.path=.* has no weights for model.norm.weight$"):
        RewardModel(RewardModelConfig(path=str(folder)), CPU)


def test_it_scores_while_the_engine_has_no_kv_cache(tmp_path, policy):
    engine = LocalEngine(policy.model, policy.end_ids(), 16, 64)
    slept = []
    sleep = engine.sleep
    engine.sleep = lambda tags=(KV_CACHE,): slept.append(list(tags)) or sleep(tags)
    own = RewardModel(RewardModelConfig(path=str(make(tmp_path))), CPU)
    scorer = Scorer({"_target_": "hybrid_rl.rewards.zero"}, workers=1, timeout=5)
    try:
        generator = Generator(engine, policy.tokenizer, scorer, reward_model=own)
        tasks = [Task(f"t{i}", ({"role": "user", "content": "x"},), "") for i in range(2)]
        for turn in (1, 2):  # and the engine samples again afterwards
            groups = [generator.new_group(i, task, 3, 40, 0, "test", i) for i, task in enumerate(tasks)]
            assert generator.fill(groups, Sampling(1.0, 0, 1.0, 6)) == 0
            assert slept == [[KV_CACHE]] * turn
            for group in groups:
                assert [r.reward for r in group.rollouts] == [r.reward_parts["reward_model"] for r in group.rollouts]
        assert len({r.reward for group in groups for r in group.rollouts}) > 1
    finally:
        scorer.close()
