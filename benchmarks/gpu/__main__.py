"""Measure hybrid_rl on a GPU, with a prediction beside each number.

    python -m benchmarks.gpu                                  # all sections, about 25 minutes on one H200
    python -m benchmarks.gpu --sections rates training        # some; the results of others stay in the file
    python -m benchmarks.gpu --device cpu --small             # tiny shapes, to try the script without a GPU

Each section is a process of its own with its own time limit, so one that fails or hangs costs no other. The results (--out,
default benchmarks/results/gpu.json) are written again after each section; one table comes at the end. Predictions are floors:
bytes over the copy rate and operations over the rate of a large matrix product, as the section `rates` measured them, or a
plan of the memory. Without a GPU the command says so in one line and ends with code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, machine, table

# seconds that a section may take: together less than half an hour, and each less than ten minutes
LIMITS = {
    "rates": 60, "host": 90, "attention": 120, "training": 420, "decode": 180, "handover": 180, "processes": 150,
    "step": 240, "curve": 540,
}  # fmt: skip
SLOWER = 5  # a busy CPU imports as slowly as that


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; return 0, 1 if one failed, or 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few repeats")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--section", choices=LIMITS, help=argparse.SUPPRESS)  # in the section's own process
    given = parser.parse_args(arguments)
    if given.device == "cuda" and (problem := no_gpu()):
        print(f"benchmarks.gpu: {problem}; --device cpu --small tries the script without one", file=sys.stderr)
        return 2
    if given.section:
        measure(given)
        return 0
    results = json.loads(given.out.read_text()) if given.out.exists() else {"sections": {}}
    results |= {"machine": machine(), "device": given.device, "small": given.small}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.sections:
        results["sections"][name] = found = run(name, given)
        write(given.out, results)
        outcome = found["error"] or f"{len(found['rows'])} numbers"
        print(f"{name}: {outcome} in {found['seconds']:.0f} s", flush=True)
    print(report(results))
    return int(any(results["sections"][name]["error"] for name in given.sections))


def no_gpu() -> str:
    """Return why no GPU can be measured, or "" if there is one."""
    try:
        import torch
    except ImportError as error:
        return f"no torch ({error})"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def run(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run one section in a process of its own; return its rows, its seconds, and its error or ""."""
    with tempfile.TemporaryDirectory() as temporary:
        out, log = Path(temporary) / "rows.jsonl", Path(temporary) / "log"
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--section",
            name,
            "--device",
            given.device,
            "--out",
            str(out),
        ]
        environment = {**os.environ, "GPU_RATES": str(given.out)}
        start, error = time.perf_counter(), ""
        limit = LIMITS[name] * (SLOWER if given.device == "cpu" else 1)
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    [*command, *["--small"] * given.small], cwd=ROOT, stdout=file, stderr=file, timeout=limit,
                    env=environment, check=False,
                ).returncode  # fmt: skip
                if code:
                    error = f"ended with code {code}: {last_line(log)}"
            except subprocess.TimeoutExpired:
                error = f"was ended after its {limit} s: {last_line(log)}"
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        tail = log.read_text(errors="replace").splitlines()[-40:] if error else []
        return {"rows": rows, "seconds": time.perf_counter() - start, "error": error, "log": tail}


def last_line(log: Path) -> str:
    """Return the last line, or the last one of a run of hybrid_rl that failed in it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines += [line for line in lines if line.startswith("hybrid_rl: ")][-1:]
    return lines[-1].strip()[:300] if lines else "no output"


def measure(given: argparse.Namespace) -> None:
    """Run a section in this process, and append each row to the file as it is measured."""
    import importlib

    import torch

    from benchmarks.gpu.measuring import Bench

    with given.out.open("a") as file:
        bench = Bench(torch.device(given.device), given.small, file, Path(os.environ.get("GPU_RATES", "")))
        importlib.import_module(f"benchmarks.gpu.{given.section}").main(bench)


def write(path: Path, results: dict[str, Any]) -> None:
    """Replace the file at once, so that what is there is whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def report(results: dict[str, Any]) -> str:
    """Return the table of all numbers, and the sections that failed."""
    lines = []
    for name, found in results["sections"].items():
        for row in found["rows"]:
            predicted = row["predicted"]
            share = f"{row['value'] / predicted:.2f}" if predicted else ""
            lines.append((name, row["what"], number(row["value"]), row["unit"], number(predicted), share, row["note"]))
    text = table(lines, ("section", "what", "measured", "unit", "predicted", "measured / predicted", "note"))
    failed = [f"{name}: {found['error']}" for name, found in results["sections"].items() if found["error"]]
    return "\n".join([text, *failed])


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
