"""The report is made from a run's files alone, whatever state they are in, and runs nothing that a completion says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_rl.report import write_report
from hybrid_rl.report.charts import _one_a_step
from hybrid_rl.report.read import read_run
from tests.report.runs import Page, evaluation, rl, write_metrics


def test_a_finished_run(finished: Path) -> None:
    html = (finished / "report.html").read_text("utf-8")
    page = Page(html)
    for expected in (
        "reverse", "2026-03-04 10:20", "seed 7", "embedded tiny model (813 k parameters)", "0.0125", "+0.328", "+0.550",
        "± 0.02 standard error, 64 tasks", "2 min 00 s", "20,000", "0.7 GiB", "SFT loss", "Completion length", "Truncated", "Entropy",
        "Mismatch KL", "nats, log scale", "Clip fraction", "Gradient norm", "Time by phase", "75 %", "Peak memory", "Learning rate", "Groups without a signal",
        "Resolved configuration", "2.13.0", "none",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert "Not finished" not in page.text
    assert "reward, the model" not in page.text, "of a run that only evaluates"
    assert html.count("<svg") == 13
    assert ">RL step</text>" in html, "chart text must stay text"
    assert len(html) < 250_000


def test_nothing_is_loaded_from_elsewhere(finished: Path) -> None:
    html = (finished / "report.html").read_text("utf-8")
    assert not re.search(r"https?:|src=|@import|url\((?!#)|href=\"(?!#)", html)
    assert Page(html).tags.isdisjoint({"script", "link", "img", "iframe", "object", "image"})


def test_an_empty_folder(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert "Not finished: no RL step yet." in page.text
    assert re.findall("reward, (base|after SFT|after RL|the model)", page.text) == ["base", "after SFT", "after RL"]
    assert "Nothing recorded yet." in page.text
    assert (tmp_path / "samples.md").read_text().count("None yet.") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "samples.md"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="is not the folder of a run"):
        write_report(tmp_path / "nowhere")


def test_in_the_middle_of_a_run(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "config.yaml").write_text("name: reverse\nrl:\n  steps: 40\n  broken: [")
    (run / "rollouts" / "step_0041.parquet").write_bytes(b"PAR1")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"stage": "rl", "step": 41, "rew')
    assert (read_run(run).rl[-1]["step"], read_run(run).broken_lines) == (40, 0)
    page = Page(write_report(run).read_text("utf-8"))
    assert "Not finished: 40 of – RL steps." in page.text
    assert "0.0125" in page.text
    assert "RL step 40" in page.text


def test_a_step_recorded_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    write_metrics(tmp_path, [rl(1), rl(2, reward=0.1), rl(3), rl(2, reward=0.9)])
    assert [(record["step"], record["reward"]) for record in read_run(tmp_path).rl] == [(1, 0.5), (2, 0.9), (3, 0.5)]


def test_values_that_are_no_numbers_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    nan, infinite = float("nan"), float("inf")
    odd = rl(
        2,
        reward=nan,
        reward_std=None,
        entropy=infinite,
        mismatch_kl=0.0,
        grad_norm="1",
        parts=None,
        seconds=None,
        skipped=1,
        missing_groups=3,
    )
    bare: dict[str, object] = {"stage": "rl", "step": 4}
    evaluation: dict[str, object] = {
        "stage": "eval",
        "name": "base",
        "step": 0,
        "reward": None,
        "tasks": 0,
        "reward_errors": 2,
    }
    write_metrics(tmp_path, [evaluation, rl(1), odd, rl(3), bare])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("[1]\nnull\n{\n\n" + json.dumps(rl(5)) + "\n")
    page = Page(write_report(tmp_path).read_text("utf-8"))
    for expected in (
        "optimizer steps skipped", "groups missing after the last replacement", "rewards that failed in evaluations", "a non-finite metric",
        "3 unreadable lines", "Gradient norm",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert "log scale" not in page.text, "a mismatch of exactly 0 has no place on a log scale"
    assert "nan" not in page.text.lower()


def test_nothing_but_gaps(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"stage": "rl", "step": 1, "reward": float("nan"), "seconds": {"rollout": None}}])
    assert "<svg" not in write_report(tmp_path).read_text("utf-8")


NEW = {
    "clip_low": 0.01, "clip_high": 0.02, "clip_dual": 0.0, "ratio_p01": 0.9, "ratio_p50": 1.0, "ratio_p99": 1.1, "ratio_max": 3.0, "dropped": 0.125,
    "correction_p01": 0.5, "correction_p50": 1.0, "correction_p99": 1.5, "correction_max": 1e6, "reference_kl": 0.01, "kl_coef": 0.03,
    "advantage_std": 0.97, "value_loss": 0.2, "explained_variance": -0.5, "repetition": 0.0625, "length_max": 100,
    "sources": {"math": 0.25, "<script>": 0.75}, "parts_std": {"similarity": 0.1},
}  # fmt: skip


def test_every_metric_of_a_step_has_its_chart(tmp_path: Path) -> None:
    write_metrics(tmp_path, [rl(1, clip_fraction=0.03), *(rl(step, clip_fraction=0.03, **NEW) for step in (2, 3))])  # type: ignore[arg-type]
    page = Page(html := write_report(tmp_path).read_text("utf-8"))
    for title, *expected in (
        ("Clip fraction", "low and high 3 %", "low side 1 %", "high side 2 %", "dual clip 0 %"),
        ("Probability ratio", "median 1", "1st percentile 0.9", "99th percentile 1.1", "largest 3"),
        ("Mismatch ratio", "before correction, log scale", "largest 1,000,000"),
        ("Dropped", "12.5 %"), ("Reference KL",), ("KL coefficient", "0.03"), ("Advantage", "0.97"), ("Critic loss",),
        ("Explained variance", "-0.5"), ("Repetition", "6.25 %"), ("Reward by source", "math 0.25", "<script> 0.75"),
    ):  # fmt: skip
        found = re.search(f"<figure>\n<figcaption><b>{title}</b>.*?</figure>", html, flags=re.DOTALL)
        assert found, title
        for text in expected:
            assert text in Page(found[0]).text, (title, text)
    assert "script" not in page.tags
    write_metrics(tmp_path, [rl(step) for step in (1, 2, 3)])
    old = write_report(tmp_path).read_text("utf-8")
    assert html.count("<svg") == old.count("<svg") + 10, "each but the clip fraction is a chart of its own"
    assert "low and high" not in old


def test_a_chart_with_many_names_says_how_many_it_left_out(tmp_path: Path) -> None:
    write_metrics(tmp_path, [rl(1, sources={f"source {i:02d}": i / 10 for i in range(11)})])
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert "mean, 8 of 11" in page.text
    assert "source 07 0.7" in page.text
    assert "source 08" not in page.text


def test_what_evaluations_find_right(tmp_path: Path) -> None:
    plain = [evaluation("base", 0, correct=0.1), evaluation("sft", 0, correct=0.2), evaluation("step", 2, correct=0.3)]
    write_metrics(tmp_path, [*plain, rl(1)])
    page = Page(write_report(tmp_path).read_text("utf-8"))
    for text in (
        "Evaluation: correct",
        "share of samples",
        "30 %",
        "± 0.05 standard error, 4 tasks, 10 % correct",
        "20 % correct",
    ):
        assert text in page.text, text
    assert "pass@" not in page.text
    shares: dict[str, object] = {"1": 0.3, "2": 0.4, "16": 0.6, "<script>": 0.9}
    write_metrics(
        tmp_path, [*plain[:2], evaluation("step", 2, pass_at=shares, sources={"math": 0.5, "code": 0.4}), rl(1)]
    )
    page = Page(write_report(tmp_path).read_text("utf-8"))
    for text in (
        "Evaluation: pass@k",
        "pass@1 30 %pass@2 40 %pass@16 60 %pass@<script> 90 %",
        "Evaluation by source",
        "math 0.5",
    ):
        assert text in page.text, text
    assert "script" not in page.tags
    write_metrics(tmp_path, [evaluation("base", 0), rl(1)])
    assert "Evaluation:" not in Page(write_report(tmp_path).read_text("utf-8")).text, "a run of old says nothing of it"


def test_the_policy_that_rl_begins_with_is_the_one_after_sft() -> None:
    evals: list[dict[str, object]] = [
        evaluation(name, step)
        for name, step in (("rl", 4), ("base", 0), ("sft", 0), ("step", 2), ("step", 6), ("?", 2))
    ]
    assert [(e["name"], e["step"]) for e in _one_a_step(evals)] == [("sft", 0), ("step", 2), ("rl", 4), ("step", 6)], (
        "a finished run went on"
    )
    assert [e["name"] for e in _one_a_step(evals[:2])] == ["base", "rl"]


def test_alarms_are_listed(tmp_path: Path) -> None:
    odd: list[object] = [None, "entropy", [], {"a": 1}]
    records = [
        rl(1),
        rl(2, alarms=["truncated", "part:<script>"]),
        *(rl(3 + i, alarms=value) for i, value in enumerate(odd)),
        rl(9, alarms=["entropy"]),
    ]
    write_metrics(tmp_path, records)
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert re.search(r"alarm begins\s+2\s*truncated, part:<script>\s+9\s*entropy\s+Samples", page.text)
    assert "Alarms began in 2 of 7 RL steps, first in step 2" in page.text
    assert "script" not in page.tags
    write_metrics(tmp_path, [rl(step, alarms=["entropy"]) for step in range(1, 46)])
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert page.text.count("entropy") == 40
    assert "and in 5 more steps" in page.text
    write_metrics(tmp_path, [rl(1, alarms=[])])
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert "Alarms" not in page.text
    assert "alarm begins" not in page.text


def test_same_files_same_bytes(run: Path) -> None:
    first = (run / "report.html").read_bytes(), (run / "samples.md").read_bytes()
    (run / "report.html").unlink()
    command = [sys.executable, "-m", "hybrid_rl.report", str(run)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == str(run / "report.html")
    assert ((run / "report.html").read_bytes(), (run / "samples.md").read_bytes()) == first


def test_importing_is_cheap() -> None:
    code = "import sys, hybrid_rl.report; sys.exit(any(m in sys.modules for m in ('matplotlib', 'jinja2', 'pyarrow', 'torch', 'yaml')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


# ---- what the page says of the run --------------------------------------------------------------------------------------


CONFIG = """
name: reverse
eval: {pass_reward: 0.5}
rollout: {batch_size: 128, group_size: 16}
algo:
  advantage: {_target_: hybrid_rl.algo.grpo.advantages}
  loss: {_target_: my.parts.loss}
  aggregation: {_target_: hybrid_rl.algo.aggregation.token_mean}
  correction: {tis: {_target_: hybrid_rl.algo.tis.correct}}
  kl: {coef: 0.01}
  minibatches: 2
  epochs: 1
rl: {steps: 40, optimizer: {lr: 3.0e-06, schedule: cosine}}
"""


def test_algorithm_rate_batch_and_what_correct_means(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    write_metrics(tmp_path, [rl(1), evaluation("base", 0, correct=0.25)])
    text = Page(write_report(tmp_path).read_text("utf-8")).text
    method = "grpo + my.parts + token_mean + tis + KL 0.01 · learning rate 3e-6 cosine · 8 tasks × 16 rollouts a step · 2 updates a step"
    assert method in text
    assert text.index(method) < text.index("reward, base"), "at the top"
    assert "25 % correct (reward ≥ 0.5)" in text
    assert "share of samples, reward ≥ 0.5" in text


def test_a_run_in_which_nothing_was_trained_says_so_in_large_letters(tmp_path: Path) -> None:
    silent, cut = {"trained": 0, "nothing_trained": "silent"}, {"trained": 0, "nothing_trained": "truncated"}
    write_metrics(tmp_path, [rl(1, **silent), rl(2, **silent), rl(3, **cut)])
    html = write_report(tmp_path).read_text("utf-8")
    assert (
        '<p class="nothing"><b>Nothing was trained</b>None of 3 RL steps had an update: in 2 of them every group was dropped'
        in html
    )
    assert "in 1 of them every rollout reached rollout.max_tokens" in html
    assert "What to do: raise rollout.max_tokens" in html
    write_metrics(tmp_path, [rl(1, **silent), rl(2, trained=8, nothing_trained=None), rl(3, **silent)])
    html = write_report(tmp_path).read_text("utf-8")
    assert 'class="nothing"' not in html
    assert "Nothing was trained in 2 of 3 RL steps, first in step 1." in html
    write_metrics(tmp_path, [rl(1), evaluation("base", 0)])
    assert "othing was trained" not in write_report(tmp_path).read_text("utf-8"), "a run of old does not say"
    write_metrics(tmp_path, [evaluation("base", 0)])
    assert "othing was trained" not in write_report(tmp_path).read_text("utf-8"), (
        "evaluations alone train nothing by intent"
    )


DEEP = "[" * 100_000 + "]" * 100_000


ODD = {
    "huge rewards": [rl(s, reward=1e308 * (-1) ** s, reward_std=1e308, parts={"a": 1.7e308, "b": -1.7e308}, grad_norm=1e-320) for s in range(1, 5)],
    "the largest float": [rl(s, reward=1.7976931348623157e308, reward_std=0.0, length=5e-324, truncated=1e308, seconds={"rollout": 1.7e308}) for s in (1, 2, 3)],
    "a step of 10**30": [rl(1), rl(10**30), rl(-1), rl(True)],
    "whole numbers beyond floats": [rl(1, reward=10**400, silent_groups=10**400, tokens_per_second=10**300)],
    "evaluations": [evaluation("base", 0, reward=1.7e308, reward_std=1e308, tasks=10**400), evaluation("rl", 1, reward=-1.7e308, correct=1e308)],
    "ratios": [rl(s, ratio_p50=5e-324, ratio_max=1.7e308, mismatch_kl=5e-324) for s in (1, 2)],
    "other kinds": [rl(1, alarms=[["x"], {"a": 1}, 3], seconds={"a": "1"}, sources=[1], nothing_trained=["silent"]), rl(2, nothing_trained="unheard")],
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_no_number_ends_the_report(tmp_path: Path, case: str) -> None:
    write_metrics(tmp_path, ODD[case])
    Page(html := write_report(tmp_path).read_text("utf-8"))
    assert not re.search(r'd="[^"]*(nan|inf)|>[^<]*\b(nan|inf)\b', html)
    if case == "a step of 10**30":
        assert "3 unreadable lines" in html


def test_no_nesting_ends_the_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        f'{DEEP}\n{{"stage": "rl", "step": 1, "reward": {DEEP}}}\n{json.dumps(rl(2))}\n'
    )
    (tmp_path / "summary.json").write_text(f'{{"name": {DEEP}}}')
    for settings in (f"name: {DEEP}", "seed: 2026-99-99", "name: !!timestamp x", "? [a]\n: 1", f"seed: {'9' * 5000}"):
        (tmp_path / "config.yaml").write_text(settings)
        assert "2 unreadable lines" in write_report(tmp_path).read_text("utf-8")
    nested = "[" * 700 + "]" * 700
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "summary.json").write_text(
        f'{{"name": {nested}, "seed": {nested}, "versions": {{"torch": {nested}}}, "model": {{"path": {nested}}}}}'
    )
    Page(write_report(tmp_path).read_text("utf-8"))
