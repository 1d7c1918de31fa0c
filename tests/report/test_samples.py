"""Samples in the report and in samples.md: which are chosen, and that nothing in a completion takes effect."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hybrid_rl.report import write_report
from hybrid_rl.report.samples import evaluation_cases, step_cases
from tests.report.runs import HOSTILE, Page, groups, rl, store, write_metrics


def test_hostile_completions_are_text(run: Path) -> None:
    config = "name: '</pre><script>alert(3)</script>'\n"
    (run / "config.yaml").write_text(config)
    (run / "summary.json").write_text(
        json.dumps({"name": "<script>alert(4)</script>", "versions": {"<script>": "<b>"}})
    )
    phases = {
        "stage": "rl",
        "step": 41,
        "seconds": {"<script>$": 1.0},
        "parts": {"<script>$x_": 1.0, "b": 0.0},
        "reward": 1.0,
    }
    write_metrics(run, [phases])
    page = Page(write_report(run).read_text("utf-8"))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name in page.attributes)
    for text in (*HOSTILE, config, "<script>alert(4)</script>", "<script>$x_"):
        assert text in page.text


def test_samples_stay_inside_their_fences(finished: Path) -> None:
    text = (finished / "samples.md").read_text("utf-8")
    assert text.startswith("# Samples of `reverse 2026-03-04 10:20`\n")
    outside, fence, inside = [], "", ""
    for line in text.split("\n"):
        if fence:
            inside += line + "\n"
            if re.fullmatch(f"{fence}`*", line):
                fence = ""
        elif opened := re.fullmatch("(`{3,})text", line):
            fence = opened[1]
        else:
            outside.append(line)
    assert fence == ""
    assert all(completion in inside for completion in HOSTILE)
    assert not any(mark in line for line in outside for mark in ("<", "{{", "# heading", "[link]"))
    assert {line for line in outside if line.startswith("## ")} == {"## Evaluation", "## RL step 40"}


def test_samples_are_chosen_by_their_rules(tmp_path: Path) -> None:
    store(tmp_path / "eval_base.parquet", groups([0.0] * 24))
    store(tmp_path / "eval_rl.parquet", groups([1.0] * 24)[::-1])
    cases = evaluation_cases(tmp_path)
    assert [case.title for case in cases] == [f"task-{id}" for id in (0, 4, 8, 12, 16, 20)]
    assert [(s.label, s.completion) for s in cases[1].samples] == [
        ("base", "completion 4 of reward 0.0"),
        ("after RL", "completion 4 of reward 1.0"),
    ]
    made = groups([0.5, 0.9, 0.1, 0.7, 0.3, 0.0])
    made[5].rollouts[0].reward, made[5].rollouts[0].error = None, "TimeoutError"
    store(tmp_path / "step_9999.parquet", groups([0.0]))
    store(tmp_path / "step_10000.parquet", made)
    (tmp_path / "step_10001.parquet").write_bytes(b"PAR1 and no more")
    ((first, _), (step, last)) = step_cases(tmp_path)
    assert (first, step) == (9999, 10000), "the newest that is whole, and the first, which is the middle one too"
    assert [(case.title, case.prompt) for case in last] == [
        ("Best: task-1", "prompt 1"),
        ("Median: task-0", "prompt 0"),
        ("Worst: task-2", "prompt 2"),
        ("Failed: task-5", "prompt 5"),
    ]
    assert ("error", "TimeoutError") in last[3].samples[0].facts


def test_a_long_completion_keeps_its_ends(tmp_path: Path) -> None:
    store(tmp_path / "rollouts" / "step_0001.parquet", groups([0.0], ("first " + "x" * 100_000 + " last",)))
    html = write_report(tmp_path).read_text("utf-8")
    assert "first x" in html
    assert "x last" in html
    assert "characters left out" in html
    assert len(html) < 40_000


def test_samples_are_of_steps_spread_evenly(tmp_path: Path) -> None:
    for step in range(1, 26):
        store(tmp_path / f"step_{step:04d}.parquet", groups([0.1 * step, 0.0, 0.05]))
    assert [step for step, _ in step_cases(tmp_path)] == [1, 4, 7, 10, 13, 16, 19, 22, 25]
    for broken in (4, 25, 24):
        (tmp_path / f"step_{broken:04d}.parquet").write_bytes(b"PAR1")
    assert [(step, cases[0].samples[0].completion[:12]) for step, cases in step_cases(tmp_path)] == [
        (step, "completion 0") for step in (1, 5, 7, 10, 13, 16, 19, 22, 23)
    ]
    for file in tmp_path.glob("step_00[01]*"):
        file.unlink()
    assert [step for step, _ in step_cases(tmp_path)] == [20, 21, 22, 23]


# ---- files that are not as a run writes them ------------------------------------------------------------------------------


STEERING = "a\x1b[31mred\x07\x00\x9b2J\u202eevil\u2066\u200f\u2028end"


ESCAPED = r"a\x1b[31mred\x07\x00\x9b2J\u202eevil\u2066\u200f\u2028end"


def test_what_steers_a_terminal_is_shown_escaped(tmp_path: Path) -> None:
    made = groups([0.5, 0.1], (STEERING + "\r\nline\tend",))
    made[0].rollouts[0].reward_parts = {STEERING: 1.0}
    made[1].rollouts[0].reward, made[1].rollouts[0].error = None, STEERING
    store(tmp_path / "rollouts" / "step_0001.parquet", made)
    write_metrics(tmp_path, [rl(1, parts={STEERING: 0.5, "\ud800": 1.0})])
    report = write_report(tmp_path)
    for text in (report.read_bytes().decode(), (tmp_path / "samples.md").read_bytes().decode()):
        assert ESCAPED + "\\r\nline\tend" in text
        assert text.count(ESCAPED) >= 3
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", text)
    assert r"\ud800 1" in report.read_text("utf-8")
