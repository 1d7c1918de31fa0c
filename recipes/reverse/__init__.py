"""Reverse a short sentence character by character. Partial credit: how similar the answer is to the true reversal."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from hashlib import sha256
from pathlib import Path

from hybrid_rl.data import TaskSets
from hybrid_rl.types import Task

ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)

# Shares of the sentences, by a hash of the text: no sentence is in two sets, whatever lengths or seed are chosen.
EVAL_BELOW, RL_BELOW = 0.1, 0.3


def similarity(completion: str, task: Task) -> float:
    """difflib's ratio of the text in the first answer tag, stripped, to the true reversal; without a tag 0.

    The ratio is Ratcliff–Obershelp, so it depends on the order: ratio(answer, truth), never the other way round.
    """
    found = ANSWER.search(completion)
    return SequenceMatcher(None, found.group(1).strip(), task.answer).ratio() if found else 0.0


def load_tasks(system_prompt: str, min_length: int, max_length: int, eval_tasks: int) -> TaskSets:
    """Tasks from sentences.txt of min_length to max_length characters (see LICENSE.wordnet.txt for their source)."""
    sets: dict[str, list[Task]] = {"eval": [], "rl": [], "sft": []}
    for line in Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines():
        if min_length <= len(line) <= max_length:
            digest = sha256(line.encode()).digest()
            place = int.from_bytes(digest[:8], "big") / 2**64
            sets["eval" if place < EVAL_BELOW else "rl" if place < RL_BELOW else "sft"].append(
                _task(line, digest.hex()[:12], system_prompt)
            )
    ordered = {
        name: sorted(tasks, key=lambda task: task.id) for name, tasks in sets.items()
    }  # by hash: in no order of meaning
    return TaskSets(sft=ordered["sft"], rl=ordered["rl"], eval=ordered["eval"][:eval_tasks])


def _task(sentence: str, id: str, system_prompt: str) -> Task:
    reversal = sentence[::-1]
    messages = ({"role": "system", "content": system_prompt}, {"role": "user", "content": sentence})
    return Task(id, messages, reversal, demonstration=f"<reversed_text>{reversal}</reversed_text>", source="wordnet")
