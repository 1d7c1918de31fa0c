"""Comparison of runs from what their folders hold: groups, means over seeds, tests, the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hybrid_rl import compare as command
from hybrid_rl.report import write_report
from hybrid_rl.report.comparison import compare, evaluated, find_runs, write_comparison

REWARDS = {1e-4: {0: 0.5, 1: 0.6, 2: 0.7}, 3e-4: {0: 0.7, 1: 0.75, 2: 0.95}}


def make_run(folder: Path, seed: int, lr: float, reward: float, finished: bool = True, name: str = "reverse") -> None:
    folder.mkdir(parents=True)
    settings = {
        "name": name,
        "seed": seed,
        "output_dir": str(folder),
        "tracker": {"tags": [str(seed)]},
        "rl": {"optimizer": {"lr": lr}, "steps": 2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = [{"stage": "eval", "name": "base", "step": 0, "reward": 0.1}]
    lines += [
        {"stage": "rl", "step": s, "reward": reward * s / 2, "length": 10.0 + seed, "tokens_per_second": 100}
        for s in (1, 2)
    ]
    lines += [{"stage": "eval", "name": "rl", "step": 2, "reward": reward}] if finished else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "summary.json").write_text(json.dumps({"eval/rl": reward, "seconds": {"total": 60.0}}))


@pytest.fixture
def sweep(tmp_path) -> Path:
    for lr, rewards in REWARDS.items():
        for seed, reward in rewards.items():
            make_run(tmp_path / "sweep" / f"{lr}_{seed}", seed, lr, reward)
    return tmp_path / "sweep"


def test_runs_equal_but_for_seed_form_a_group(sweep):
    comparison = compare(find_runs([sweep]))
    assert [group.label for group in comparison.groups] == ["lr=0.0001", "lr=0.0003"]
    assert comparison.settings == ["rl.optimizer.lr"]
    for group, rewards in zip(comparison.groups, REWARDS.values(), strict=True):
        assert group.values(evaluated) == {str(seed): reward for seed, reward in rewards.items()}


def test_means_intervals_and_paired_tests(sweep):
    stats = pytest.importorskip("scipy.stats")
    header, (first, second) = compare(find_runs([sweep])).table()
    one, two = (list(rewards.values()) for rewards in REWARDS.values())
    half = stats.t.ppf(0.975, 2) * stats.sem(two)
    assert second[header.index("evaluation")] == f"0.8 ± {half:.2g}"
    differences = [b - a for a, b in zip(one, two, strict=True)]
    assert second[header.index("vs first")] == f"+0.2 ± {stats.t.ppf(0.975, 2) * stats.sem(differences):.2g}"
    assert second[header.index("p")] == f"{stats.ttest_rel(one, two).pvalue:.2g}"
    assert first[header.index("vs first")] == first[header.index("p")] == "–"
    assert first[header.index("RL reward")].startswith("0.45 ")  # mean over both steps: 0.75 · 0.6


def test_only_common_seeds_are_paired(sweep, tmp_path):
    make_run(tmp_path / "other", 9, 3e-4, 0.0)
    header, (_, second) = compare(find_runs([sweep, tmp_path / "other"])).table()
    assert second[header.index("runs")] == "4"
    assert second[header.index("vs first")].startswith("+0.2 ")


def test_settings_that_differ_in_name_alone_are_told_apart(tmp_path):
    make_run(tmp_path / "a", 0, 1e-4, 0.5)
    make_run(tmp_path / "b", 0, 1e-4, 0.5)
    config = yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())
    config |= {"sft": {"optimizer": {"lr": 0.1}}, "rl": {"optimizer": {"lr": 0.2}, "steps": 2}}
    (tmp_path / "b" / "config.yaml").write_text(yaml.safe_dump(config))
    labels = [group.label for group in compare(find_runs([tmp_path])).groups]
    assert labels == ["rl.optimizer.lr=0.0001, sft.optimizer.lr=–", "rl.optimizer.lr=0.2, sft.optimizer.lr=0.1"]


def test_an_unfinished_run_counts_with_its_last_evaluation(tmp_path):
    make_run(tmp_path / "a", 0, 1e-4, 0.5, finished=False)
    comparison = compare(find_runs([tmp_path / "a"]))
    assert comparison.runs() == [[str(tmp_path / "a"), "reverse", "0", "0.1", "2", "not finished"]]


def test_runs_of_one_seed_count_once_and_unfinished_ones_only_if_there_is_no_other(tmp_path):
    for name, reward, finished in (("a", 0.9, True), ("b", 0.5, True), ("c", 0.7, True), ("d", 0.01, False)):
        make_run(tmp_path / name, 0, 1e-3, reward, finished)
    (group,) = compare(find_runs([tmp_path])).groups
    assert group.values(evaluated) == {"0": pytest.approx(0.7)}
    assert compare(find_runs([tmp_path])).table()[1][0][1:3] == ["4 (1 seed)", "0.7"]


def test_the_page_is_one_file_and_escapes_what_runs_wrote(sweep, tmp_path):
    make_run(tmp_path / "evil", 0, 1e-4, 0.5, name="<script>alert(1)</script>")
    write_comparison(compare(find_runs([sweep, tmp_path / "evil"])), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "src=" not in page
    assert "href=" not in page
    assert page.count("<svg") == 4  # reward, evaluation, length, throughput
    assert page.count('class="band"') >= 3


def test_a_report_with_another_run(sweep):
    one, other = sweep / "0.0001_0", sweep / "0.0001_1"
    alone = write_report(one).read_text()
    both = write_report(one, other=other).read_text()
    assert "What differs" not in alone
    assert both.count("<svg") == alone.count("<svg") + 4
    for run in (one, other):
        assert str(run) in both
    assert "<script" not in both


def test_the_command(sweep, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main([str(sweep)]) == 0
    assert (sweep / "comparison.html").is_file()
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["lr=0.0001", "lr=0.0003"]
    assert command.main([str(sweep / "0.0001_0"), str(sweep / "0.0003_0")]) == 0
    assert (tmp_path / "comparison.html").is_file()
    assert command.main([str(tmp_path / "nothing")]) == 1
    assert "is no run's folder" in capsys.readouterr().err
