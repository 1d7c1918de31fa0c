"""The benchmark of a GPU, tried on the CPU with tiny shapes: every section gives its numbers, and one that fails costs no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import LIMITS, main, report

ROOT = Path(__file__).parents[2]


def run(*arguments: str, timeout: float = 1200) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run(timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmarks.gpu: torch ")
    assert line.endswith("finds no GPU; --device cpu --small tries the script without one")


@pytest.mark.slow
def test_every_section_gives_its_numbers(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--small", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert list(results["sections"]) == list(LIMITS)
    for name, found in results["sections"].items():
        assert found["error"] == ""
        assert found["rows"], name
        assert all(row["value"] > 0 or row["note"] for row in found["rows"]), name
    whats = {row["what"] for found in results["sections"].values() for row in found["rows"]}
    assert {"device copy", "product", "park 0.01 GiB", "4 rows", "buckets of 1 MiB", "payloads of 4 MiB"} <= whats
    assert {"local: update", "local: rollout", "local: handover", "bfloat16, seed 0: reward"} <= whats
    assert all(what in done.stdout for what in whats)


def test_a_section_that_fails_or_hangs_costs_no_other(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "gpu.json"
    out.write_text(
        json.dumps({"sections": {"curve": {"rows": [], "seconds": 1.0, "error": "an older one", "log": []}}})
    )
    monkeypatch.setitem(LIMITS, "rates", 0.01)
    monkeypatch.setattr(command, "no_gpu", lambda: "")

    class Ended:
        returncode = 3

    limits = []

    def fake(given, *, stdout, timeout, **_):
        limits.append(timeout)
        if "rates" in given:
            raise subprocess.TimeoutExpired(given, timeout)
        stdout.write("Traceback\nRuntimeError: out of memory\n")
        stdout.flush()
        Path(given[given.index("--out") + 1]).write_text(
            json.dumps({"what": "4 rows", "value": 2500.0, "unit": "tokens/s", "predicted": 5000.0, "note": "n"}) + "\n"
        )
        return Ended

    monkeypatch.setattr(command.subprocess, "run", fake)
    assert main(["--sections", "rates", "decode", "--out", str(out)]) == 1
    sections = json.loads(out.read_text())["sections"]
    assert limits == [0.01, LIMITS["decode"]]
    assert sections["curve"]["error"] == "an older one"
    assert sections["rates"]["error"] == "was ended after its 0.01 s: no output"
    assert sections["decode"]["error"] == "ended with code 3: RuntimeError: out of memory"
    assert sections["decode"]["rows"][0]["value"] == 2500.0  # what was measured before it failed
    printed = capsys.readouterr().out
    assert report({"sections": sections}) in printed
    assert "| decode  | 4 rows | 2,500    | tokens/s | 5,000     | 0.50" in printed
