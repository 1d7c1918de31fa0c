"""Explain a word in one sentence, for a given reader. There is no answer to compare with: a judge scores."""

from __future__ import annotations

import re
from typing import Any

from hybrid_rl.types import Task

READERS = ("a child", "a cook", "a pilot", "an engineer", "a gardener", "a musician")
WORDS = """
acid anchor atom bacteria battery bridge calendar carbon cell circuit cloud comet compass copper crystal current
desert echo eclipse energy enzyme erosion fever fossil friction fungus gene glacier gravity harvest hinge
hormone inflation insulin interest island jet lens lever light loan lock magnet market mirror moon muscle nerve
orbit ore oxygen pendulum pollen prism protein pulley pump rainbow rent river root rust salt satellite seed
shadow soap soil sound spring star steam storm tax tide turbine vaccine valve vinegar virus volcano vote wave
whale wheel wind yeast
"""
HELD_OUT = 6  # each so many-th word is held out


def rows(held_out: bool) -> list[dict[str, Any]]:
    """Return a task for each word and reader; a word is either held out or not."""
    words = [word for i, word in enumerate(WORDS.split()) if (i % HELD_OUT == 0) == held_out]
    prompt = "Explain in one sentence, for {}, what this is: {}"
    return [{"prompt": prompt.format(reader, word), "answer": ""} for word in words for reader in READERS]


def one_sentence(completion: str, task: Task) -> float:
    """Pay 1 for one sentence: some text that ends in its only full stop, question mark or exclamation mark."""
    return float(re.fullmatch(r"[^.!?\n]+[.!?]", completion.strip()) is not None)
