"""Run the recipe as a user would, measure matrix products, and write results, for all benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def run_recipe(folder: Path, *overrides: str, recipe: str = "reverse") -> Path:
    """Run `python -m hybrid_rl.run +recipe=… …` in a child process; return the run's folder."""
    command = [sys.executable, "-m", "hybrid_rl.run", f"+recipe={recipe}", f"hydra.run.dir={folder}", *overrides]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


def aimless_reward(completion: str, task: object) -> float:
    """Return a hash of the completion: deterministic, and hardly ever equal in a whole group. For timing only."""
    return zlib.crc32(completion.encode()) % 100 / 100


def read_metrics(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of one stage."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["stage"] == stage]


def machine() -> dict[str, Any]:
    """Return facts about this machine and the versions of its software."""
    from hybrid_rl.machine import machine, versions

    return {**machine(), **versions()}


def matmul_gflops(m: int, k: int, n: int, seconds: float = 0.5) -> float:
    """Return the best rate, in GFLOP/s, of float32 products [m, k] × [k, n] in this process."""
    import torch

    a, b = torch.randn(m, k), torch.randn(k, n)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * m * k * n / best / 1e9


def save_result(name: str, result: dict[str, Any]) -> None:
    """Write results/<name>.json, with facts about the machine and its load."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({**result, "machine": machine(), "load": os.getloadavg()[0]}, indent=2) + "\n"
    )


def table(rows: list[tuple[Any, ...]], header: tuple[str, ...]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [header, *[tuple(f"{c:.3f}" if isinstance(c, float) else str(c) for c in row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
