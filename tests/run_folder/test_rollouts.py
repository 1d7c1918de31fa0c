"""Rollouts survive the disk exactly, and a file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybrid_rl.run_folder.files import atomic_file
from hybrid_rl.run_folder.rollouts import SCHEMA, as_rollout, read_rollouts, remove_old, write_rollouts
from hybrid_rl.types import Group, Rollout, Task

TEXT = "naïve 日本 😀\n\r\n`</script>` \x00 {{ 7*7 }}"


def group(id: int, completion: str = TEXT) -> Group:
    task = Task(f"task-{id}", ({"role": "user", "content": TEXT},), answer=TEXT, source="words")
    scored, failed = (Rollout(task.id, id, index, seed=2**63 - 1, token_ids=[7, 8]) for index in range(2))
    scored.add_sampled([9, 2], [-0.5, -0.25], [(3, 1), (4, 1)])
    scored.add_observed([11])
    scored.finish("stop", completion)
    scored.score(0.75, {"similarity": 0.5, "länge": 0.25}, {"exact": 1.0}, "a")
    scored.shape("overlong", -0.5)
    failed.error, failed.fault = "TimeoutError: 10 s", "timeout"
    return Group(id, task, [scored, failed])


def test_round_trip_keeps_every_fact_and_its_absence(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_0001.parquet"
    tokens = {(4, 0): {"log_ratios": np.array([-0.125, 1e6]), "entropies": np.array([1.5, 0.25])}}
    write_rollouts(path, [group(4), group(5)], ["prompt 4", "prompt 5"], {(4, 0): 1.5}, [(4, 0)], tokens)
    rows = read_rollouts(path)
    assert [(row["group_id"], row["index"], row["trained"]) for row in rows] == [
        (4, 0, True),
        (4, 1, False),
        (5, 0, False),
        (5, 1, False),
    ]
    assert rows[0] == {
        "task_id": "task-4", "source": "words", "group_id": 4, "index": 0, "seed": 2**63 - 1, "prompt": "prompt 4", "completion": TEXT,
        "answer": TEXT, "token_ids": [7, 8, 9, 2, 11], "prompt_length": 2, "loss_mask": [False, False, True, True, False],
        "logprobs": [0.0, 0.0, -0.5, -0.25, 0.0], "log_ratios": [0.0, 0.0, -0.125, 65504.0, 0.0],
        "entropies": [0.0, 0.0, 1.5, 0.25, 0.0], "advantages": None, "versions": [(3, 1), (4, 1)], "finish_reason": "stop", "outcome": 0.75,
        "reward": 0.25, "reward_parts": {"similarity": 0.5, "länge": 0.25, "overlong": -0.5}, "measures": {"exact": 1.0}, "extracted": "a", "advantage": 1.5, "trained": True,
        "error": None, "fault": None,
    }  # fmt: skip
    assert as_rollout(rows[0]) == group(4).rollouts[0]
    assert as_rollout(rows[1]) == group(4).rollouts[1]
    assert (
        rows[1]
        | {
            "versions": [],
            "finish_reason": None,
            "outcome": None,
            "reward": None,
            "reward_parts": {},
            "advantage": None,
            "log_ratios": None,
            "entropies": None,
        }
        == rows[1]
    )
    assert (rows[1]["error"], rows[1]["fault"]) == ("TimeoutError: 10 s", "timeout")
    assert rows[2]["advantage"] is None
    assert read_rollouts(path, ["reward", "versions"])[0] == {"reward": 0.25, "versions": [(3, 1), (4, 1)]}
    assert pq.read_schema(path).equals(SCHEMA)


def test_only_the_newest_steps_and_the_first_stay(tmp_path: Path) -> None:
    """Evaluations between steps go with their steps; those of the stages, and what is none of ours, stay."""
    names = [f"step_{n:04d}" for n in range(1, 13)] + [
        "eval_step_0004",
        "eval_step_0010",
        "eval_base",
        "eval_rl",
        "step_mine",
        "step_10000",
    ]
    for name in names:
        (tmp_path / f"{name}.parquet").touch()
    remove_old(tmp_path, 12, 0)
    assert len(list(tmp_path.iterdir())) == len(names)
    remove_old(tmp_path, 12, 3)
    left = {f.stem for f in tmp_path.iterdir()}
    assert left == {"step_0001", "step_0010", "step_0011", "step_0012", "eval_step_0010", *names[-4:]}


def test_no_groups_give_an_empty_file_of_the_same_schema(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "empty.parquet", [], [], {}, [])
    assert read_rollouts(tmp_path / "empty.parquet") == []
    assert pq.read_schema(tmp_path / "empty.parquet").equals(SCHEMA)


def test_a_lone_surrogate_does_not_cost_the_record(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.parquet", [group(0, completion="a\ud800b")], [""], {}, [])
    assert read_rollouts(tmp_path / "a.parquet")[0]["completion"] == "a?b"


def test_what_names_no_group_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(ValueError, match="1 prompts for 2 groups"):
        write_rollouts(path, [group(0), group(1)], ["a"], {}, [])
    with pytest.raises(ValueError, match=r"\(0, 2\)"):
        write_rollouts(path, [group(0)], ["a"], {(0, 2): 1.0}, [])
    with pytest.raises(ValueError, match=r"\[\(9, 0\)\]"):
        write_rollouts(path, [group(0)], ["a"], {}, [(9, 0)])
    with pytest.raises(ValueError, match="not in the groups"):
        write_rollouts(path, [group(0)], ["a"], {}, [], {(9, 0): {}})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [group(0)], ["old"], {}, [])

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"half of a new f")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_half()
    assert read_rollouts(path)[0]["prompt"] == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_whole_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [group(0)], ["a"], {}, [])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(pa.ArrowInvalid):
        read_rollouts(path)
