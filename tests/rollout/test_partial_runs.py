"""Whole runs whose groups take several steps: killed and resumed to the bit, on one rank and on two, and what they say of themselves."""

import json
import math
from pathlib import Path

import pytest

from tests.test_run import kill_when, metrics, rollouts, run, run_folder, same, start

pytestmark = pytest.mark.slow

# completions of 1 to 24 tokens, from a model that nothing has taught
SETTINGS = [
    "sft.steps=0",
    "rollout.max_prompt_tokens=200",
    "rollout.oversample=1.5",
    "algo.minibatches=2",
    "rl.steps=5",
]


@pytest.fixture(scope="module")
def settings(folder_of) -> list[str]:
    return [*SETTINGS, f"model.path={folder_of('staggered')}", "reward._target_=tests.faults.parts.hashed"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, settings) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, *settings)


def underway(folder: Path, step: int) -> list[dict]:
    """The groups under way that the checkpoint of a step holds."""
    state = run_folder(folder) / "checkpoints" / f"rl_{step:06d}" / "state.json"
    return json.loads(state.read_text())["collector"]["underway"]


def begun(groups: list[dict]) -> int:
    return sum(c["finish_reason"] == "abort" for group in groups for c in group["completions"].values())


def test_a_run_killed_with_groups_under_way_goes_on_to_the_bit(whole, settings, tmp_path):
    assert begun(underway(whole[0], 4)) > 0
    kill_when(start(tmp_path, *settings), "step 3/5")
    assert begun(underway(tmp_path, 2)) > 0
    run(tmp_path, *settings, "resume=must")
    same(whole[0], tmp_path)


def test_two_ranks_killed_with_groups_under_way_go_on_to_the_bit(settings, tmp_path):
    folders = [tmp_path / name for name in ("whole", "killed")]
    settings = [*settings, "ranks=2", "rollout.max_tokens=64"]
    for folder in folders:
        folder.mkdir()
    run(folders[0], *settings)
    kill_when(start(folders[1], *settings), "step 3/5")
    assert begun(underway(folders[1], 2)) > 0
    run(folders[1], *settings, "resume=must")
    same(*folders)


def test_the_metrics_are_those_of_the_rollouts(whole):
    """By brute force from the files: shares of tokens by lag, and the mean ratio of each lag in a step of one update a token."""
    steps, files, seen = [m for m in metrics(whole[0]) if m["stage"] == "rl"], rollouts(whole[0]), set()
    for m in steps:
        counts, ratios = dict[int, int](), dict[int, list[float]]()
        for row in files[f"step_{m['step']:04d}.parquet"]:
            of = [m["step"] - 1 - version for version, count in row["versions"] for _ in range(count)]
            sampled = [i for i, own in enumerate(row["loss_mask"]) if own]
            assert len(of) == len(sampled)
            for lag, place in zip(of, sampled, strict=True):
                counts[lag] = counts.get(lag, 0) + 1
                if row["log_ratios"] is not None:
                    ratios.setdefault(lag, []).append(math.exp(row["log_ratios"][place]))
        tokens = sum(counts.values())
        assert m["lag"] == pytest.approx({str(lag): count / tokens for lag, count in counts.items()})
        assert m["lag_mean"] == pytest.approx(sum(lag * count for lag, count in counts.items()) / tokens)
        means = {str(lag): sum(found) / len(found) for lag, found in ratios.items()}
        assert m["ratio_by_lag"] == pytest.approx(means, rel=2e-3)  # files hold float16
        assert m["mismatch_kl"] is None or m["mismatch_kl"] < 1e-6  # of new tokens alone
        assert (m["discarded_rollouts"], m["groups_left"]) == (0, 2)
        assert "correction_by_lag" not in m
        seen |= counts.keys()
    assert {0, 1} <= seen
    line = next(line for line in whole[1].splitlines() if line.startswith("step 3/5"))
    assert f"lag {steps[2]['lag_mean']:.2f} (most {max(map(int, steps[2]['lag']))})" in line
    assert f"continued {steps[2]['continued_rollouts']}" in line


def test_without_oversampling_nothing_is_said_of_it(settings, tmp_path):
    output = run(tmp_path, *settings, "rollout.oversample=1", "rl.steps=2")
    assert "continued" not in output
    keys = {key for m in metrics(tmp_path) for key in m}
    assert not keys & {"lag", "lag_mean", "continued_rollouts", "discarded_rollouts", "groups_left", "ratio_by_lag"}
    state = run_folder(tmp_path) / "checkpoints" / "rl_000002" / "state.json"
    assert json.loads(state.read_text())["collector"].keys() == {"sampler", "next_group"}


def test_corrections_are_reported_by_lag(settings, tmp_path):
    more = ["algo/correction=tis", "algo.old_logprobs=recomputed", "rollout.max_staleness=1", "rl.steps=4"]
    run(tmp_path, *settings, *more)
    steps = [m for m in metrics(tmp_path) if m["stage"] == "rl"]
    assert all(m["correction_by_lag"].keys() == m["lag"].keys() for m in steps)
    assert all(m["correction_by_lag"]["0"] == pytest.approx(1, abs=1e-4) for m in steps if "0" in m["lag"])
    assert any(abs(m["correction_by_lag"].get("1", 1) - 1) > 1e-4 for m in steps)
    assert all(max(map(int, m["lag"])) <= 1 for m in steps)
