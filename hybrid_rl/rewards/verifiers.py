"""Single-turn environments written for `verifiers`: their tasks and their rubrics, without the package being a dependency.

What is used of an environment is its documented interface alone: get_dataset and get_eval_dataset, whose rows have
`prompt`, and perhaps `answer`, `info` and `task`; `max_turns`; and `rubric` with its functions, weights, parser and
class_objects, or the `rubrics` of a group.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from hydra.utils import get_method

from hybrid_rl.data.tasks import DataError
from hybrid_rl.types import Task

GROUPED = ("completions", "prompts", "answers", "states", "infos")  # arguments of functions that score a whole group


def load(function: str, arguments: Mapping[str, Any]) -> Any:
    """Return the environment that a load_environment makes. Raises DataError for one of several turns or none."""
    environment = get_method(function)(**arguments)
    if absent := [name for name in ("get_dataset", "rubric") if not hasattr(environment, name)]:
        raise DataError(f"{function} returned {type(environment).__name__}, which has no {absent[0]}: no environment")
    if (turns := getattr(environment, "max_turns", 1)) != 1:
        raise DataError(
            f"{function}: its environment takes several turns (max_turns={turns}); only single turns can be used"
        )
    return environment


def rows(
    function: str, split: Literal["train", "eval"] = "train", arguments: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the environment's training or evaluation tasks, for `data.rl` and `data.eval`.

    function: the path of load_environment, my_env.load_environment; arguments: its own. A row has prompt, answer (as
    a text, "" if there is none), and as columns info and task, if there are any. Raises DataError for a row without a prompt.
    """
    environment = load(function, arguments or {})
    for number, row in enumerate(environment.get_dataset() if split == "train" else environment.get_eval_dataset(), 1):
        if not row.get("prompt"):
            raise DataError(f"{function}, row {number} of {split}: has no prompt; there are: {', '.join(row)}")
        answer = row.get("answer")
        kept = {name: row[name] for name in ("info", "task") if row.get(name) not in (None, "", {})}
        yield {
            "prompt": row["prompt"],
            "answer": answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer),
            **kept,
        }


class Verifiers:
    """Pay what the rubric of a `verifiers` environment pays: each function is a part, its weight times its value.

    A function of weight 0 is a measure. A function gets by name what it takes of prompt, completion (both lists of
    messages), answer, info, task, state (a dict of these), parser, and the rubric's class objects; it may be async.
    function, arguments: as for `rows`. Raises DataError for a function that scores a whole group.
    """

    def __init__(self, function: str, arguments: Mapping[str, Any] | None = None):
        environment = load(function, arguments or {})
        self.functions: list[tuple[str, Callable[..., Any], float, dict[str, Any]]] = []
        for rubric in getattr(environment.rubric, "rubrics", None) or [environment.rubric]:
            functions = rubric.get_reward_funcs() if hasattr(rubric, "get_reward_funcs") else rubric.funcs
            weights = rubric.get_reward_weights() if hasattr(rubric, "get_reward_weights") else rubric.weights
            objects = {"parser": getattr(rubric, "parser", None), **(getattr(rubric, "class_objects", None) or {})}
            for scorer, weight in zip(functions, weights, strict=True):
                name = getattr(scorer, "__name__", type(scorer).__name__)
                if grouped := [p for p in inspect.signature(scorer).parameters if p in GROUPED]:
                    raise DataError(f"{function}: {name} scores a whole group ({grouped[0]}), which is not supported")
                self.functions.append((name, scorer, float(weight), objects))
        if not any(weight for _, _, weight, _ in self.functions):
            raise DataError(f"{function}: its rubric pays nothing; every weight is 0")

    async def __call__(self, completion: str, task: Task) -> tuple[dict[str, float], dict[str, float]]:
        info = task.columns.get("info", {})
        state: dict[str, Any] = {
            "prompt": [dict(message) for message in task.messages],
            "completion": [{"role": "assistant", "content": completion}],
            "answer": task.answer,
            "info": json.loads(info) if isinstance(info, str) else info,
            "task": task.columns.get("task", "default"),
        }
        parts: dict[str, float] = {}
        measures: dict[str, float] = {}
        for name, scorer, weight, objects in self.functions:
            value = scorer(**_taken(scorer, {**objects, **state, "state": state}))
            value = float(await value if inspect.isawaitable(value) else value)
            into, paid = (parts, weight * value) if weight else (measures, value)
            into[name] = into.get(name, 0.0) + paid  # of functions of one name the sum
        return parts, measures


def _taken(scorer: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the given values that the function takes by name."""
    parameters = inspect.signature(scorer).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}
