"""Rewards that compare texts, and where in a completion the answer stands."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from hybrid_rl.types import Task

Scored = tuple[float, dict[str, str | None]]  # a reward, and the answer that it found


def find_answer(completion: str, within: str | None) -> str | None:
    r"""Return the text of the answer, stripped; None if there is none.

    within: null, the whole completion; "boxed", the last \boxed{…}; "####", what follows the last ####, in its line;
    any other text, the last pair of tags of that name, as <answer>…</answer>.
    """
    if within is None:
        return completion.strip()
    if within == "boxed":
        return _boxed(completion)
    if within == "####":
        _, mark, after = completion.rpartition("####")
        return after.strip().partition("\n")[0].strip() if mark else None
    before, end, _ = completion.rpartition(f"</{within}>")
    _, begin, answer = before.rpartition(f"<{within}>")
    return answer.strip() if end and begin else None


def _boxed(completion: str) -> str | None:
    _, mark, text = completion.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(text if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place].strip()
    return None


def exact(completion: str, task: Task, within: str | None = None, ignore_case: bool = False) -> Scored:
    """Pay 1 if the answer in the completion is task.answer, both stripped. within: see `find_answer`."""
    found, truth = find_answer(completion, within), task.answer.strip()
    if ignore_case:
        found, truth = found and found.casefold(), truth.casefold()
    return float(found == truth), {"answer": found}


def zero(completion: str, task: Task) -> float:
    """Pay nothing: for runs that are paid by a reward model alone (reward_model.path)."""
    return 0.0


def contains(completion: str, task: Task) -> float:
    """Pay 1 if task.answer occurs in the completion. Raises ValueError for an empty answer, which occurs in all."""
    if not task.answer:
        raise ValueError(f"task {task.id} has no answer to look for")
    return float(task.answer in completion)


def similarity(completion: str, task: Task, within: str | None = None) -> Scored:
    """Pay difflib's ratio (Ratcliff–Obershelp) of the answer to task.answer, from 0 to 1; 0 without an answer."""
    found = find_answer(completion, within)
    ratio = 0.0 if found is None else SequenceMatcher(None, found, task.answer, autojunk=False).ratio()
    return ratio, {"answer": found}


def matches(completion: str, task: Task, pattern: str, whole: bool = True) -> float:
    """Pay 1 if the pattern matches the whole completion (whole=false: some place in it); . matches line breaks."""
    expression = re.compile(pattern, re.DOTALL)  # kept by re
    return float((expression.fullmatch if whole else expression.search)(completion) is not None)
