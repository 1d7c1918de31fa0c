"""The command on several ranks as a user meets it: the same run as on one, resumed on more or fewer, and ended when a rank dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.faults.runs import left_of
from tests.test_run import ENVIRONMENT, SMALL, copied, metrics, rollouts, run, run_folder, start

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("one")
    return folder, run(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run(folder, "ranks=2")


def test_two_ranks_are_one_run(one, two):
    """One set of files, each line once, and the numbers of one rank as long as rounding has not moved a sampled token."""
    folder, output = two
    assert "2 ranks on cpu" in output
    assert sum(line.startswith("step ") for line in output.splitlines()) == 6
    assert {p.name for p in run_folder(folder).iterdir()} == {p.name for p in run_folder(one[0]).iterdir()}
    ours, theirs = metrics(folder), metrics(one[0])
    assert [(line["stage"], line.get("step")) for line in ours] == [
        (line["stage"], line.get("step")) for line in theirs
    ]
    for a, b in zip(ours[:5], theirs[:5], strict=True):  # evaluation, SFT, evaluation, first step
        assert a.keys() == b.keys()
        numbers = [key for key in a if isinstance(a[key], float) and key not in ("mismatch_kl", "cache_hit_rate")]
        assert {key: a[key] for key in numbers} == pytest.approx({key: b[key] for key in numbers}, rel=1e-3, abs=1e-6)
    base = [rollouts(f)["eval_base.parquet"] for f in (folder, one[0])]
    assert [r["token_ids"] for r in base[0]] == [r["token_ids"] for r in base[1]]
    first = [rollouts(f)["step_0001.parquet"] for f in (folder, one[0])]
    assert sum(a["token_ids"] == b["token_ids"] for a, b in zip(*first, strict=True)) > 0.9 * len(first[0])
    assert all(line["mismatch_kl"] < 1e-6 for line in ours if line["stage"] == "rl")
    memory = next(
        json.loads(line)["memory"] for line in (run_folder(folder) / "metrics.jsonl").open() if '"rl"' in line
    )
    assert list(memory) == ["handover", "rollout", "sleep", "update"]
    assert all(len(pair) == 2 for pair in memory.values())


def test_each_rank_saves_its_part(two):
    names = {p.name for p in (run_folder(two[0]) / "checkpoints" / "rl_000006").iterdir()}
    shards = {f"{part}.0000{rank}-of-00002.safetensors" for part in ("policy", "optimizer") for rank in (0, 1)}
    assert names == {*shards, "state.json", "COMPLETE"}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_goes_on_with_another_number_of_ranks(two, tmp_path, ranks):
    folder = copied(two, tmp_path)
    output = run(tmp_path, f"resume={folder}", f"ranks={ranks}", "rl.steps=8")
    assert "resumed: rl_000006, version 6" in output
    lines = metrics(tmp_path)
    assert (
        lines[: len(metrics(two[0])) - 1] == metrics(two[0])[:-1]
    )  # all but the evaluation that ended the shorter run
    assert [line["step"] for line in lines if line["stage"] == "rl"] == list(range(1, 9))
    names = {p.name for p in (folder / "checkpoints" / "rl_000008").iterdir()}
    assert f"policy.00000-of-{ranks:05d}.safetensors" in names
    moved = [load_file(f / "final" / "model.safetensors") for f in (folder, run_folder(two[0]))]
    assert all(
        0 < (moved[0][n] - moved[1][n]).abs().max() < 0.02 for n in moved[0]
    )  # two steps of lr 4e-4, eight minibatches


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes that are ranks, in order."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            command, environment = child.cmdline(), child.environ()
        except psutil.Error:
            continue
        if "hybrid_rl.run" in command and "RANK" in environment:
            found[int(environment["RANK"])] = child
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_in_seconds(tmp_path, victim):
    process = start(tmp_path, "ranks=2", "rl.steps=20")
    for line in process.stdout:
        if "step  2/20" in line:
            break
    since = time.perf_counter()
    ranks_of(process)[victim].send_signal(signal.SIGKILL)
    rest = process.communicate(timeout=30)[0]
    assert process.returncode == 1
    assert time.perf_counter() - since < 15
    assert f"rank {victim} was ended by SIGKILL" in rest
    assert "Traceback" not in rest
    assert not left_of(tmp_path)
    assert "step 20/20" in run(tmp_path, "ranks=2", "rl.steps=20", "resume=auto")


def test_an_error_of_all_ranks_is_said_once(tmp_path):
    output = run(tmp_path, "ranks=2", "data.eval_tasks=0", code=1)
    assert output.count("the eval set has 0 tasks") == 1
    assert "Traceback" not in output
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(b"nothing")
    output = run(tmp_path, "ranks=2", f"model.path={broken}", code=1)
    assert output.count(f"model.path={broken}") == 1
    assert "Traceback" not in output


@pytest.mark.skipif(
    not shutil.which("torchrun", path=Path(sys.executable).parent), reason="torchrun is not beside this python"
)
def test_two_nodes_of_torchrun_on_this_machine(one, tmp_path):
    """--nnodes 2: two launchers that know each other only by an address; parameters are sharded inside a node and replicated across."""
    torchrun = shutil.which("torchrun", path=Path(sys.executable).parent)
    port = 20000 + os.getpid() % 20000
    overrides = [*SMALL, "rl.steps=2", "rl.eval_every=0"]
    nodes = []
    try:
        for node in (0, 1):
            command = [
                torchrun, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--rdzv-backend", "static", "--master-addr",
                "127.0.0.1", "--master-port", str(port), "-m", "hybrid_rl.run", *overrides,
            ]  # fmt: skip
            environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
            nodes.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "2 ranks on cpu" in outputs[0]
    assert "hybrid_rl ·" not in outputs[1]
    a, b = (next(line for line in metrics(f) if line["stage"] == "rl") for f in (tmp_path, one[0]))
    assert a["reward"] == pytest.approx(b["reward"], abs=0.02)
    assert torch.isfinite(load_file(run_folder(tmp_path) / "final" / "model.safetensors")["model.norm.weight"]).all()
