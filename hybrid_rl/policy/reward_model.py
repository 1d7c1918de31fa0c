"""A reward model: a sequence classifier of one label, which scores whole conversations after sampling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from hybrid_rl.config import RewardModelConfig
from hybrid_rl.model_folder.read import FROM_FOLDER, ModelError, reason, stored_tensors
from hybrid_rl.policy.offload import Offloaded, release_cached
from hybrid_rl.processes import hangs
from hybrid_rl.types import Group, Rollout, Task

PART = "reward_model"  # the name of its part of the reward
KEY = "reward_model.path"
FAILED = "reward model"  # the kind of its faults


def check_reward_model(folder: str | Path) -> None:
    """Raise ModelError unless the folder holds a sequence classifier with one label; reads no weights."""
    try:
        config = AutoConfig.from_pretrained(folder, **FROM_FOLDER)
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except Exception as error:
        raise ModelError(f"{KEY}={folder}: is no sequence classifier: {reason(error)}") from error
    try:
        stored = stored_tensors(folder)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path=", f"{KEY}=")) from error
    body = f"{model.base_model_prefix}."
    head = [name for name, _ in model.named_parameters() if not name.startswith(body)]
    if absent := [name for name in head if name not in stored]:
        raise ModelError(
            f"{KEY}={folder}: is no sequence classifier: its files have no {absent[0]}; "
            "name a reward model that AutoModelForSequenceClassification reads"
        )
    if config.num_labels != 1:
        raise ModelError(f"{KEY}={folder}: has {config.num_labels} labels; a reward model has one, its score")


class RewardModel(Offloaded):
    """The whole model on every rank, in bfloat16 on a GPU and float32 on a CPU; on a GPU it waits in host memory.

    It reads what its own tokenizer makes of a conversation: by its chat template, or without one the prompt's text and
    the completion as a pair.
    """

    def __init__(self, settings: RewardModelConfig, device: torch.device):
        assert settings.path is not None
        check_reward_model(settings.path)
        self.settings, self.device = settings, device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(settings.path, **FROM_FOLDER)
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                settings.path, dtype=dtype, use_safetensors=True, output_loading_info=True, **FROM_FOLDER
            )
        except Exception as error:
            raise ModelError(f"{KEY}={settings.path} cannot be loaded: {reason(error)}") from error
        if absent := sorted(loaded["missing_keys"]):  # transformers would use random numbers there
            raise ModelError(f"{KEY}={settings.path} has no weights for {absent[0]}")
        self.model: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        self.pad = self.model.config.get_text_config().pad_token_id
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.longest = min(settings.max_tokens, positions or settings.max_tokens)
        self.park()

    def waits(self) -> bool:
        """Return True on a GPU, where the engine needs the memory."""
        return self.device.type != "cpu"

    def waiting(self) -> Iterable[Tensor]:
        return self.model.parameters()

    def pay(self, groups: Sequence[tuple[Group, Rollout]]) -> None:
        """Add the weighted score to the reward of each rollout, as a part, or with weight 0 as a measure.

        A rollout whose reward failed has no score. One that cannot be scored (too long, a score that is no number) has
        an error and no reward any more.
        """
        scored = [(group.task, rollout) for group, rollout in groups if rollout.error is None]
        encoded: list[tuple[Rollout, list[int]]] = []
        for task, rollout in scored:
            try:
                ids = self._ids(task, rollout.completion)
            except Exception as error:  # the template is a program that came with the model
                _fail(rollout, f"the reward model's tokenizer does not take it: {type(error).__name__}: {error}")
                continue
            if len(ids) > self.longest:
                _fail(rollout, f"the conversation has {len(ids)} tokens, and the reward model takes {self.longest}")
            else:
                encoded.append((rollout, ids))
        self.unpark()
        for batch in self._batches(encoded):
            for (rollout, _), score in zip(batch, self.scores([ids for _, ids in batch]), strict=True):
                _add(rollout, score, self.settings.weight)
            hangs.progress()
        self.park()
        release_cached(self.device)

    def _ids(self, task: Task, completion: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            prompt = "\n\n".join(message["content"] for message in task.messages)
            return list(self.tokenizer(prompt, completion)["input_ids"])
        turns = [*task.messages, {"role": "assistant", "content": completion}]
        return list(
            self.tokenizer(self.tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)[
                "input_ids"
            ]
        )

    def _batches(self, encoded: list[tuple[Rollout, list[int]]]) -> Iterator[list[tuple[Rollout, list[int]]]]:
        """Yield batches of at most batch_tokens tokens, padding included; of one if the model has no pad token."""
        ordered = sorted(encoded, key=lambda each: len(each[1]))
        batch: list[tuple[Rollout, list[int]]] = []
        for each in ordered:
            full = (len(batch) + 1) * len(each[1]) > self.settings.batch_tokens
            if batch and (full or self.pad is None):
                yield batch
                batch = []
            batch.append(each)
        if batch:
            yield batch

    @torch.no_grad()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each text of token ids; padded on the right to the longest."""
        longest, pad = max(map(len, texts)), self.pad or 0
        ids = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts], device=self.device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=self.device)
        return self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()


def _add(rollout: Rollout, score: float, weight: float) -> None:
    if not math.isfinite(score):
        return _fail(rollout, f"the reward model's score is {score}")
    assert rollout.outcome is not None
    if PART in rollout.reward_parts or PART in rollout.measures:
        return _fail(rollout, f"the reward has a part or measure {PART}, which the reward model adds too; rename it")
    parts, measures = rollout.reward_parts, rollout.measures
    if weight:
        parts = {**parts, PART: weight * score}
    else:
        measures = {**measures, PART: score}
    return rollout.score(rollout.outcome + weight * score, parts, measures, rollout.extracted)


def _fail(rollout: Rollout, why: str) -> None:
    rollout.outcome = rollout.reward = None
    rollout.error, rollout.fault = why, FAILED
