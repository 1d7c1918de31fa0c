"""Rewards for answers in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from hybrid_rl.sandbox.code import same
from hybrid_rl.types import Task

BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)
NONE: Any = object()


def read_json(completion: str) -> Any:
    """Return the JSON value of the last fenced block, or without one of the whole completion; NONE if it is no JSON."""
    blocks = BLOCK.findall(completion)
    try:
        return json.loads(blocks[-1] if blocks else completion)
    except (ValueError, RecursionError):
        return NONE


class JsonSchema:
    """Pay 1 if the completion is JSON that a JSON Schema accepts (pip install 'hybrid_rl[rewards]').

    schema: for all tasks; or column: the key of task.columns that holds a task's own.
    """

    def __init__(self, schema: dict[str, Any] | None = None, column: str | None = None):
        if (schema is None) == (column is None):
            raise ValueError("give JsonSchema either schema or column")
        try:
            from jsonschema.validators import validator_for
        except ImportError as error:
            raise ImportError(
                "JsonSchema needs jsonschema, which is not installed; pip install -e '.[rewards]'"
            ) from error
        self.validator_for, self.column = validator_for, column
        self.validator = self._checked(schema) if schema is not None else None

    def __call__(self, completion: str, task: Task) -> float:
        validator = self.validator
        if validator is None:
            if (own := task.columns.get(str(self.column))) is None:
                raise ValueError(f"task {task.id}: has no column {self.column!r} with a JSON Schema")
            validator = self._checked(json.loads(own) if isinstance(own, str) else own)
        value = read_json(completion)
        return float(value is not NONE and validator.is_valid(value))

    def _checked(self, schema: Any) -> Any:
        kind: Any = self.validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)


def json_fields(completion: str, task: Task) -> tuple[float, dict[str, float]]:
    """Pay the share of the fields of task.answer, a JSON object, that the completion's object has with the same value.

    A field too many counts as a wrong one. Measure: exact, whether all are right. Raises ValueError if task.answer is
    no object.
    """
    truth = json.loads(task.answer)
    if not isinstance(truth, dict) or not truth:
        raise ValueError(f"task {task.id}: its answer must be a JSON object with fields")
    value = read_json(completion)
    if not isinstance(value, dict):
        return 0.0, {"exact": 0.0}
    right = sum(name in value and same(value[name], wanted) for name, wanted in truth.items())
    share = right / len(truth.keys() | value.keys())
    return share, {"exact": float(share == 1)}
