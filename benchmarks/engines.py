"""Compare the engines: start, sampling, sleep, wake and handover, in the phases of a step.

    python benchmarks/engines.py [--model /models/Qwen3-0.6B] [--engines local sglang] [--repeats 5]

Each engine gets the same requests: 8 prompts × 16 samples of at most 128 tokens at temperature 1. "mismatch" compares
the log-probabilities of engine and trainer on the sampled tokens. "copy" is the lower bound of a handover: the same
bytes copied once in the same process. "transitions" is the share of sleep, wake and handover in a turn with sampling
and no update. Without --model a tiny random model and one of 10 M parameters are made. On a CPU, SGLang needs the
environment of `make sglang-cpu`: `make bench-engines`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import save_result, table
from handover import SHAPES, build

from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.config import Config, EngineConfig, EngineKind, TinyConfig
from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, Completion, Request, Sampling
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.policy import tiny
from hybrid_rl.policy.layout import sampled_tokens
from hybrid_rl.policy.model import Policy, pick_device
from hybrid_rl.policy.update import score
from hybrid_rl.session import build_engine
from hybrid_rl.types import Rollout

GROUPS, SIZE, PROMPT, TOKENS = 8, 16, 48, 128


def requests(vocabulary: int) -> list[Request]:
    """Return requests with random prompts: the samples of a group share the prompt, each has its own seed."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (GROUPS, PROMPT), generator=generator).tolist()
    return [Request(i, prompts[i // SIZE], seed=i) for i in range(GROUPS * SIZE)]


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Call `function`; return its seconds, including the work on the GPU, and its value."""
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def mismatch(policy: Policy, asked: list[Request], completions: list[Completion]) -> float:
    """Return the mean of ρ − 1 − log ρ over the sampled tokens, ρ = π_train / π_engine."""
    rollouts = []
    for c in sorted(completions, key=lambda c: c.id):
        rollout = Rollout("t", c.id // SIZE, c.id % SIZE, c.id, list(asked[c.id].prompt_ids))
        rollout.add_sampled(c.token_ids, c.logprobs, c.versions)
        rollouts.append(rollout)
    own = score(policy, rollouts, 1.0)
    return float(mismatch_kl(own, sampled_tokens(rollouts, policy.device).behaviour_logprobs).mean())


def measure(kind: EngineKind, folder: Path, repeats: int) -> dict[str, Any]:
    """Return the measurements of one engine on one model: medians over `repeats` turns after a warm-up."""
    device = pick_device("auto")
    policy = Policy.load(folder, device)
    config = Config(engine=EngineConfig(kind=kind, slots=GROUPS * SIZE))
    config.rollout.max_prompt_tokens, config.rollout.max_tokens = PROMPT, TOKENS
    started, engine = timed(lambda: build_engine(config, policy), device)
    asked, sampling = requests(policy.vocabulary), Sampling(max_tokens=TOKENS)
    turns: dict[str, list[float]] = {name: [] for name in ("handover", "sampling", "sleep", "tokens/s", "copy")}
    moved, kl = 0, 0.0
    scratch = [torch.empty_like(p, dtype=policy.dtype) for p in policy.parameters.values()]
    engine.sleep([KV_CACHE, WEIGHTS])
    for turn in range(repeats + 1):  # the first one warms up
        given, moved = timed(lambda turn=turn: hand_over(policy, engine, turn, verify=turn == 0), device)
        sampled, completions = timed(lambda: list(engine.generate(asked, sampling)), device)
        slept, _ = timed(lambda: take_back(policy, engine), device)
        copied, _ = timed(
            lambda: [t.copy_(p.detach()) for t, p in zip(scratch, policy.parameters.values(), strict=True)], device
        )
        if turn == 0:
            kl = mismatch(policy, asked, completions)
            continue
        tokens = sum(len(c.token_ids) for c in completions)
        for name, value in zip(turns, (given, sampled, slept, tokens / sampled, copied), strict=True):
            turns[name].append(value)
    engine.close()
    middle = {name: median(values) for name, values in turns.items()}
    between = middle["handover"] + middle["sleep"]
    return {
        "engine": kind.value,
        "parameters": policy.parameter_count(),
        "device": str(device),
        "dtype": str(policy.dtype),
        "start": started,
        **middle,
        "MB": moved / 1e6,
        "handover/copy": middle["handover"] / middle["copy"] if moved else 0.0,
        "transitions": between / (between + middle["sampling"]),
        "mismatch": kl,
    }


def main() -> None:
    """Measure all engines on all models, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--engines", nargs="+", default=["local", "sglang"], choices=["local", "sglang"])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = (
            {given.model.name: given.model}
            if given.model
            else {"tiny": Path(folder) / "tiny", "10M": Path(folder) / "10M"}
        )
        if not given.model:
            torch.set_num_threads(1)
            tiny.create(models["tiny"], TinyConfig(), seed=0)
            build(models["10M"], SHAPES["10M"])
        results = [
            {"model": n, **measure(EngineKind(kind), path, given.repeats)}
            for n, path in models.items()
            for kind in given.engines
        ]
    header = (
        "model",
        "engine",
        "start s",
        "sampling s",
        "tokens/s",
        "handover s",
        "of copy",
        "sleep s",
        "transitions",
        "mismatch",
    )
    keys = ("model", "engine", "start", "sampling", "tokens/s", "handover", "handover/copy", "sleep", "transitions")
    print(table([(*(r[key] for key in keys), f"{r['mismatch']:.0e}") for r in results], header))
    for name in models:
        speed = {r["engine"]: r["tokens/s"] for r in results if r["model"] == name}
        if len(speed) == 2:
            print(f"{name}: sglang samples at {speed['sglang'] / speed['local']:.2f} times local's speed")
    save_result("engines", {"groups": GROUPS, "size": SIZE, "prompt": PROMPT, "tokens": TOKENS, "rows": results})


if __name__ == "__main__":
    main()
