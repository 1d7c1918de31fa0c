"""An engine in a process of its own: payloads by CUDA IPC, memory given back and taken again. SGLang itself if it is installed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu import stand_in
from benchmarks.gpu.measuring import GIB, Bench
from hybrid_rl.config import Config, EngineConfig, EngineKind
from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, Request, Sampling
from hybrid_rl.engine.sglang.interface import unusable
from hybrid_rl.engine.sglang.weights import payload
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.session import build_engine

MIB, PATIENCE = 2**20, 60.0


def main(bench: Bench) -> None:
    """The stand-in first; its two mechanisms are what SGLang's handover and sleep rest on."""
    with child(bench) as (connection, saves):
        _payloads(bench, connection)
        _regions(bench, connection, saves)
    if problem := unusable():
        bench.row("SGLang", 0.0, "", None, problem)
    elif bench.on_gpu:
        _sglang(bench)


@contextmanager
def child(bench: Bench) -> Iterator[tuple[Connection, str]]:
    """Start the stand-in, and end it whatever happens."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    preload = _preloaded()
    with preload:
        process = context.Process(target=stand_in.main, args=(there, bench.device.type), daemon=True)
        process.start()
    try:
        there.close()
        yield here, receive(here)[1]
        here.send(("end",))
        process.join(10)
    finally:
        process.kill()
        process.join(10)


@contextmanager
def _preloaded() -> Iterator[None]:
    """torch_memory_saver's library must be there before CUDA is, so the child is started with it if the package is installed."""
    try:
        from torch_memory_saver import configure_subprocess
    except Exception:
        yield
        return
    with configure_subprocess():
        yield


def receive(connection: Connection) -> tuple[str, str]:
    if not connection.poll(PATIENCE):
        raise TimeoutError(f"the stand-in has not answered for {PATIENCE:.0f} s")
    return connection.recv()


def _payloads(bench: Bench, connection: Connection) -> None:
    """Our real payloads of all weights, bucket by bucket; then what is left of their memory here."""
    policy = bench.policy("0.6B")
    size = policy.parameter_count() * policy.dtype.itemsize
    for mib in (1, 4) if bench.small else (256, 512, 1024):

        def handed(mib: int = mib) -> None:
            for bucket in policy.buckets(policy.dtype, mib * MIB):
                connection.send(("load", payload(list(bucket.items()), bench.device, policy.dtype)))
                receive(connection)
                if bench.on_gpu:
                    torch.cuda.ipc_collect()

        seconds = bench.seconds(handed, repeats=3, warm=1)
        held = torch.cuda.memory_allocated() / GIB if bench.on_gpu else 0.0
        peak, _ = bench.peak(handed)
        # 4 + 2 to cast and gather, 2 + 2 into the flat copy, 2 + 2 into the weights
        bench.row(
            f"payloads of {mib} MiB",
            size / seconds / 1e9,
            "GB/s",
            bench.rate("copy") * 2 / 14 / 1e9,
            f"{seconds:.3f} s",
        )
        if bench.on_gpu:
            left = torch.cuda.memory_allocated() / GIB - held
            largest = max(sum(t.nbytes for t in bucket.values()) for bucket in policy.buckets(policy.dtype, mib * MIB))
            bench.row(
                f"payloads of {mib} MiB: rise of memory",
                (peak - held) * 1024,
                "MiB",
                3 * largest / MIB,
                f"{left * 1024:.0f} MiB are left after it",
            )


def _regions(bench: Bench, connection: Connection, saves: str) -> None:
    """Sleep and wake of the child's memory, until all processes see it free, and taken again."""
    for gib in (0.01,) if bench.small else (2, 8, 20, 40):
        size = int(gib * GIB)
        connection.send(("hold", size))
        receive(connection)
        free = torch.cuda.mem_get_info()[0] if bench.on_gpu else 0
        for operation in ("pause", "resume"):
            start = time.perf_counter()
            connection.send((operation,))
            receive(connection)
            seconds = time.perf_counter() - start
            change = abs(torch.cuda.mem_get_info()[0] - free) / GIB if bench.on_gpu else 0.0
            note = f"{saves}; {change:.1f} GiB {'came free' if operation == 'pause' else 'from before it slept'}"
            bench.row(f"{operation} {gib} GiB", seconds, "s", None, note)


def _sglang(bench: Bench) -> None:
    """Turns of SGLang on the 0.6B shape: start, handover, sampling, sleep."""
    policy, config = bench.policy("0.6B"), Config(engine=EngineConfig(kind=EngineKind.sglang, slots=128))
    config.rollout.max_prompt_tokens, config.rollout.max_tokens = 64, 128
    start = time.perf_counter()
    engine = build_engine(config, policy)
    bench.row("SGLang starts", time.perf_counter() - start, "s")
    engine.sleep([KV_CACHE, WEIGHTS])
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, policy.vocabulary, (8, 64), generator=generator).tolist()
    size = policy.parameter_count() * policy.dtype.itemsize
    try:
        for turn in range(3):
            times = [time.perf_counter()]
            hand_over(policy, engine, turn, verify=turn == 0)
            times.append(time.perf_counter())
            asked = [Request(i, prompts[i % 8], seed=i) for i in range(128)]
            sampled = sum(len(c.token_ids) for c in engine.generate(asked, Sampling(max_tokens=128)))
            times.append(time.perf_counter())
            take_back(policy, engine)
            times.append(time.perf_counter())
        given, sampling, slept = (b - a for a, b in pairwise(times))
        bench.row("SGLang: handover", given, "s", 7 * size / bench.rate("copy"))
        bench.row("SGLang: 128 rows", sampled / sampling, "tokens/s")
        bench.row("SGLang: sleep", slept, "s")
    finally:
        engine.close()
