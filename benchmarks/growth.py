"""Measure how seconds and memory grow with rollouts, lengths, steps, parameters and ranks; fail if one grows too fast.

    python -m benchmarks.growth [--most-tokens 1200000] [--most-steps 2000] [--only PART …]

Each part runs at growing sizes along one axis, everything else as it is. The exponent is the slope of log(value) over
log(size), fitted to the points above the noise. A part fails if an exponent exceeds that of its floor by more than
MARGIN. Seconds are those of this process on the CPU, one thread, the least of several turns, so that other processes
hardly matter. Bytes are the peak of what Python and numpy allocate, or of the process's memory if torch does.
The exit code is 1 if a part fails. Results: growth.json, growth.md and growth.png in benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks import common

MARGIN = 0.3  # by which a fitted exponent may exceed the floor's: caches, pages that are touched for the first time
LEAST_SECONDS, LEAST_BYTES, LEAST_RESIDENT = 0.003, 2**16, 2**25  # below: noise, not fitted
TURNS, PATIENCE = 5, 0.5  # turns of a measurement, and the seconds after which no further one begins
GROUP = 16  # rollouts of one prompt
VOCABULARY = 64
SIZES: dict[str, Sequence[int]] = {
    "rollouts": (128, 256, 512, 1024, 2048),
    "completion": (128, 512, 2048, 8192),
    "prompt": (64, 512, 2048, 8192),
    "steps": (10, 100, 500, 2000),
    "hidden": (64, 128, 256),
    "ranks": (1, 2, 4, 8),
}
USUAL = {"rollouts": 128, "completion": 128, "prompt": 64, "hidden": 64, "ranks": 1}
Work = Callable[[], object]
Make = Callable[..., Work]  # of the sizes → what is measured


@dataclass(frozen=True)
class Part:
    """`floors` has the exponent that no implementation can be below, for each axis: of seconds and of peak bytes."""

    name: str
    make: Make
    floors: dict[str, tuple[float, float]]
    resident: bool = False  # torch allocates: look at the process's memory
    most: int = 2**62  # tokens, as the part is slow
    fewer: int = 1  # divides the numbers of rollouts


def rollouts(rollouts: int, prompt: int, completion: int, **_: int) -> list[Any]:
    """Return scored rollouts, in groups of GROUP with a prompt each."""
    from hybrid_rl.types import Rollout

    made, numbers = [], np.random.default_rng(0)
    for i in range(rollouts):
        if i % GROUP == 0:
            ids = numbers.integers(0, VOCABULARY, prompt)
        r = Rollout(f"task-{i // GROUP}", i // GROUP, i % GROUP, i, ids)
        r.add_sampled(numbers.integers(0, VOCABULARY, completion), -numbers.random(completion), [(0, completion)])
        r.finish("stop", "text " * (completion // 5))
        r.score(float(i % 3), {"exact": float(i % 3)})
        made.append(r)
    return made


def groups(found: Sequence[Any]) -> list[Any]:
    from hybrid_rl.types import Group, Task

    parts = [found[i : i + GROUP] for i in range(0, len(found), GROUP)]
    ask = ({"role": "user", "content": "ask"},)
    return [Group(part[0].group_id, Task(part[0].task_id, ask, "answer"), list(part)) for part in parts]


# ---- parts on the host -----------------------------------------------------------------------------------------------


def build(**sizes: int) -> Work:
    """Record completions as an engine gives them (lists), checked."""
    from hybrid_rl.types import Rollout

    given = [
        (r.token_ids[: r.prompt_length], *(x[r.loss_mask].tolist() for x in (r.token_ids, r.logprobs)))
        for r in rollouts(**sizes)
    ]

    def run() -> None:
        for prompt, ids, logprobs in given:
            Rollout("t", 0, 0, 0, prompt).add_sampled(ids, logprobs, [(0, len(ids))])

    return run


def gather(**sizes: int) -> Work:
    from hybrid_rl.policy.layout import sampled_tokens

    return partial(sampled_tokens, rollouts(**sizes))


def exchange(**sizes: int) -> Work:
    """Pickle and unpickle, as ranks do that send each other their rollouts."""
    found = rollouts(**sizes)
    return lambda: pickle.loads(pickle.dumps(found))  # noqa: S301


def pack_rows(layout: str, **sizes: int) -> Work:
    """Make every row of every rank."""
    from hybrid_rl.policy.layout import pack
    from hybrid_rl.processes.ranks import Ranks

    found, row = rollouts(**sizes), max(16384, sizes["prompt"] + sizes["completion"])

    def run() -> None:
        for rank in range(sizes["ranks"]):
            for _ in pack(found, layout, row, Ranks(rank, sizes["ranks"])):  # type: ignore[arg-type]
                pass

    return run


def metrics(**sizes: int) -> Work:
    from hybrid_rl.report.step_metrics import rollout_metrics
    from hybrid_rl.rollout.collector import Batch

    return partial(rollout_metrics, Batch(groups=groups(rollouts(**sizes))))


def parquet(**sizes: int) -> Work:
    from hybrid_rl.run_folder.rollouts import write_rollouts

    found = rollouts(**sizes)
    own = groups(found)
    tokens = {(r.group_id, r.index): {"entropies": r.logprobs[r.loss_mask]} for r in found}
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "step_0001.parquet"

    def run() -> None:
        assert folder  # it is removed with this function
        write_rollouts(path, own, ["prompt"] * len(own), {}, [], tokens)

    return run


# ---- parts of a run's length ----------------------------------------------------------------------------------------


def _lines(steps: int) -> Iterator[dict[str, Any]]:
    seconds = {"handover": 0.0, "rollout": 0.2, "sleep": 0.0, "update": 0.2}
    for step in range(1, steps + 1):
        yield {
            "step": step, "reward": 0.5 + step / 1e4, "reward_std": 0.3, "length": 20.0, "entropy": 1.0, "loss": 0.1,
            "grad_norm": 1.0, "truncated": 0.0, "mismatch_kl": 1e-12, "clip_fraction": 0.1, "seconds": seconds,
            "memory": {name: [0.5, 0.5] for name in seconds}, "tokens_per_second": 7000.0, "lr": 1e-3, "alarms": [],
        }  # fmt: skip


def write_metrics(steps: int, **_: int) -> Work:
    from hybrid_rl.run_folder.metrics import Metrics

    folder = tempfile.TemporaryDirectory()

    def run() -> None:
        file = Metrics(Path(folder.name) / "metrics.jsonl")
        for line in _lines(steps):
            file.write("rl", **line)
        file.close()

    return run


def report(steps: int, **_: int) -> Work:
    """Write the report of a run with so many steps, whose last 100 rollout files are there."""
    from hybrid_rl.report import write_report

    folder = tempfile.TemporaryDirectory()
    lines = (json.dumps({"stage": "rl", **line}) for line in _lines(steps))
    (Path(folder.name) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    parquet_file = _one_file(Path(folder.name) / "rollouts")
    for step in range(max(2, steps - 99), steps + 1):
        (parquet_file.parent / f"step_{step:04d}.parquet").hardlink_to(parquet_file)
    return lambda: (folder, write_report(Path(folder.name)))


def resume_metrics(steps: int, **_: int) -> Work:
    """Open the metrics as a resumed run does."""
    from hybrid_rl.run_folder.metrics import Metrics

    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "metrics.jsonl"
    path.write_text("".join(json.dumps({"stage": "rl", **line}) + "\n" for line in _lines(steps)))
    return lambda: (folder, Metrics(path, keep_lines=steps).close())


def remove_rollouts(steps: int, **_: int) -> Work:
    """Look for old rollout files after each of 20 steps; the newest 100 are kept."""
    from hybrid_rl.run_folder.rollouts import remove_old

    folder = tempfile.TemporaryDirectory()
    for step in range(max(1, steps - 99), steps + 1):
        (Path(folder.name) / f"step_{step:04d}.parquet").touch()

    def run() -> None:
        for _ in range(20):
            remove_old(Path(folder.name), steps, 100)

    return run


def _one_file(folder: Path) -> Path:
    from hybrid_rl.run_folder.rollouts import write_rollouts

    found = groups(rollouts(32, 64, 128))
    write_rollouts(folder / "step_0001.parquet", found, ["prompt"] * len(found), {}, [])
    return folder / "step_0001.parquet"


# ---- phases ----------------------------------------------------------------------------------------------------------


def attention(**sizes: int) -> Work:
    """One layer of 2 heads, forward and backward, over all rows of group trees."""
    from hybrid_rl.attention.attend import LayerAttention
    from hybrid_rl.policy.layout import pack

    rows = list(pack(rollouts(**sizes), "trees", max(16384, sizes["prompt"] + sizes["completion"])))
    how = LayerAttention(0.25)

    def run() -> None:
        for row in rows:
            q, k, v = (torch.ones(1, 2, len(row.input_ids), 16, requires_grad=True) for _ in range(3))
            row.layout.attend(0, q, k, v, how).sum().backward()

    return run


def _policy(hidden: int) -> Any:
    from hybrid_rl.config import PolicyConfig, TinyConfig
    from hybrid_rl.policy import tiny
    from hybrid_rl.policy.model import Policy

    with tempfile.TemporaryDirectory() as folder:
        shape = TinyConfig(hidden_size=hidden, intermediate_size=3 * hidden, max_positions=32768)
        tiny.create(Path(folder) / "model", shape, seed=0)
        return Policy.load(Path(folder) / "model", torch.device("cpu"), PolicyConfig(row_tokens=16384))


def update(hidden: int, **sizes: int) -> Work:
    """Forward, backward and AdamW on all rollouts at once."""
    from hybrid_rl.policy.rows import RowLoss, accumulate

    policy, found = _policy(hidden), rollouts(**sizes)
    optimizer = torch.optim.AdamW(policy.trainable.values())

    def run() -> None:
        accumulate(policy, found, lambda row: RowLoss(-policy.logprobs(row, 1.0)[0]), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def sample(hidden: int, rollouts: int, prompt: int, completion: int, **_: int) -> Work:
    """Sample completions of full length with the engine that shares the policy's memory."""
    from hybrid_rl.engine.base import Request, Sampling
    from hybrid_rl.engine.local import LocalEngine

    policy = _policy(hidden)
    engine = LocalEngine(policy.sampler, frozenset([policy.vocabulary]), 128, prompt + completion)
    engine.set_version(0)
    wanted = [Request(i, [1 + i // GROUP] * prompt, i) for i in range(rollouts)]
    return lambda: list(engine.generate(wanted, Sampling(max_tokens=completion)))


def hand_over(hidden: int, **_: int) -> Work:
    """Copy the weights into an engine's own memory."""
    policy, other = _policy(hidden), _policy(hidden)

    def run() -> None:
        for bucket in policy.buckets(torch.float32, 2**29):
            for name, tensor in bucket.items():
                other.parameters[name].data.copy_(tensor)

    return run


LINEAR = {"rollouts": (1.0, 1.0), "completion": (1.0, 1.0), "prompt": (1.0, 1.0)}
# attention alone is quadratic; a mask would make the bytes so too
SQUARE = {"rollouts": (1.0, 0.0), "completion": (2.0, 1.0), "prompt": (2.0, 1.0)}
PARTS = (
    Part("build and check", build, LINEAR),
    Part("gather tokens", gather, LINEAR),
    Part("exchange", exchange, LINEAR),
    Part("pack padded", partial(pack_rows, "padded"), LINEAR),
    Part("pack packed", partial(pack_rows, "packed"), LINEAR | {"ranks": (1.0, 0.0)}),
    Part("pack trees", partial(pack_rows, "trees"), LINEAR | {"ranks": (1.0, 0.0)}),
    Part("metrics", metrics, LINEAR),
    Part("parquet", parquet, LINEAR),
    Part("metrics.jsonl", write_metrics, {"steps": (1.0, 0.0)}),
    Part("resume", resume_metrics, {"steps": (1.0, 1.0)}),
    Part("remove old files", remove_rollouts, {"steps": (0.0, 0.0)}),
    Part("report", report, {"steps": (1.0, 1.0)}),
    Part("attention of trees", attention, SQUARE, resident=True, most=2**17, fewer=4),
    # a row's activations are at most those of row_tokens; memory then follows the tokens themselves
    Part("update", update, SQUARE | {"rollouts": (1.0, 1.0), "hidden": (2.0, 2.0)}, True, most=70_000, fewer=4),
    Part("sample", sample, SQUARE | {"rollouts": (1.0, 1.0), "hidden": (2.0, 2.0)}, True, most=25_000, fewer=4),
    Part("handover", hand_over, {"hidden": (2.0, 2.0)}, resident=True),
)


# ---- measuring -------------------------------------------------------------------------------------------------------


def seconds_of(work: Work) -> float:
    """Return the least seconds of this process's CPU."""
    best, end = math.inf, time.perf_counter() + PATIENCE
    for turn in range(TURNS):
        if turn and time.perf_counter() > end:
            break
        gc.collect()
        gc.disable()  # it would look at all records of the batch at moments of its own
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
        gc.enable()
    return best


def bytes_of(work: Work, resident: bool) -> int:
    """Return the peak of the bytes that the work adds."""
    gc.collect()
    if resident:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        work()
        return max(0, _status("VmHWM") - before)
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def exponent(points: Sequence[tuple[int, float]], least: float) -> float | None:
    """Return the slope of log(value) over log(size) of the points above the noise, None for fewer than three."""
    clear = [(math.log(size), math.log(value)) for size, value in points if value >= least]
    if len(clear) < 3:
        return None
    xs, ys = np.array(clear).T
    return float(np.polyfit(xs, ys, 1)[0])


def measure(part: Part, most_tokens: int, most_steps: int) -> list[dict[str, Any]]:
    """Measure one part along each of its axes."""
    found = []
    for axis, (of_seconds, of_bytes) in part.floors.items():
        seconds: list[tuple[int, float]] = []
        peaks: list[tuple[int, float]] = []
        for size in SIZES[axis]:
            sizes = USUAL | {axis: size}
            sizes["rollouts"] //= part.fewer
            tokens = sizes["rollouts"] * (sizes["prompt"] + sizes["completion"])
            if size > (most_steps if axis == "steps" else size) or tokens > min(most_tokens, part.most):
                break
            work = part.make(**sizes)
            size = sizes.get(axis, size)
            seconds.append((size, seconds_of(work)))
            peaks.append((size, bytes_of(work, part.resident)))
        exponents = exponent(seconds, LEAST_SECONDS), exponent(peaks, LEAST_RESIDENT if part.resident else LEAST_BYTES)
        floors = of_seconds, of_bytes
        failed = any(e is not None and e > floor + MARGIN for e, floor in zip(exponents, floors, strict=True))
        found.append(
            {
                "part": part.name,
                "axis": axis,
                "seconds": seconds,
                "bytes": peaks,
                "exponents": exponents,
                "floors": floors,
                "failed": failed,
            }
        )
    return found


def row_of(result: dict[str, Any]) -> tuple[str, ...]:
    (first, _), (last, seconds) = result["seconds"][0], result["seconds"][-1]
    shown = ["–" if e is None else f"{e:.2f}" for e in result["exponents"]]
    (time_floor, byte_floor), peak = result["floors"], result["bytes"][-1][1]
    return (
        result["part"], f"{result['axis']} {first}–{last}", f"{seconds:.4f}", f"{peak / 2**20:.1f}",
        f"{shown[0]} ({time_floor:g})", f"{shown[1]} ({byte_floor:g})", "too fast" if result["failed"] else "",
    )  # fmt: skip


HEADER = ("part", "axis", "s at the last", "peak MiB", "exponent of s (floor)", "of bytes (floor)", "")


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys(r["axis"] for r in results))
    figure, grid = plt.subplots(2, len(axes), figsize=(3.2 * len(axes), 6.5), squeeze=False)
    for column, axis in enumerate(axes):
        for row, what in enumerate(("seconds", "bytes")):
            place = grid[row][column]
            for r in (r for r in results if r["axis"] == axis):
                place.plot(*zip(*((x, max(y, 1e-6)) for x, y in r[what]), strict=True), marker=".", label=r["part"])
            place.set(xscale="log", yscale="log", title=f"{what} by {axis}")
        grid[0][column].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS, folder: Path = common.RESULTS) -> int:
    """Measure, print the table, write the results; return 1 if something grows too fast."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--most-tokens", type=int, default=1_200_000, help="of a batch; larger points are left out")
    parser.add_argument("--most-steps", type=int, default=SIZES["steps"][-1])
    parser.add_argument("--only", nargs="*", default=[], help="names of parts")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    results: list[dict[str, Any]] = []
    for part in (part for part in parts if not chosen.only or part.name in chosen.only):
        for result in measure(part, chosen.most_tokens, chosen.most_steps):
            if not result["seconds"]:
                continue
            results.append(result)
            print(" | ".join(row_of(result)), file=sys.stderr, flush=True)
    text = common.table([row_of(r) for r in results], HEADER)
    print(text)
    folder.mkdir(exist_ok=True)
    (folder / "growth.json").write_text(
        json.dumps({"results": results, "margin": MARGIN, "machine": common.machine()}, indent=1) + "\n"
    )
    (folder / "growth.md").write_text(text + "\n")
    plot(results, folder / "growth.png")
    failed = [f"{r['part']} by {r['axis']}" for r in results if r["failed"]]
    print(f"growth: {len(results)} measured, too fast: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
