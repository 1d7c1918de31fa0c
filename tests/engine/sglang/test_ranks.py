"""Several ranks with the real SGLang: an engine for each, or one for a team by tensor parallelism; the tokens are those of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.config import PolicyConfig
from hybrid_rl.engine.base import EngineError, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.engine.sglang.options import SGLangOptions
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.policy.model import Policy
from hybrid_rl.processes.ranks import Ranks
from tests.engine_contract import collect, requests
from tests.ranks import on_ranks

SAMPLING = Sampling(max_tokens=16)


def expected(folder: Path) -> dict[int, list[int]]:
    policy = Policy.load(folder, torch.device("cpu"))
    engine = LocalEngine(policy.model, policy.end_ids(), 8, 64)
    engine.set_version(0)
    return {c.id: c.token_ids for c in engine.generate(requests(), Sampling(temperature=0.0, max_tokens=16))}


def sampled(ranks: Ranks, folder: Path, other: Path, width: int) -> dict[str, Any]:
    """Engines that begin with other weights get those of `folder`, shard by shard."""
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i) for i in range(width))
    policy = Policy.load(folder, torch.device("cpu"), PolicyConfig(), ranks)
    options = SGLangOptions(arguments={"max_total_tokens": 65536})
    engine = SGLangEngine(other, policy.end_ids(), 8, 64, options, ranks.team(width))
    result: dict[str, Any] = {}
    try:
        moved = hand_over(policy, engine, 1, verify=True, bucket_bytes=4096)
        result["moved"] = moved == sum(p.numel() * 4 for p in policy.parameters.values())
        wanted = [requests()[i] for i in ranks.share(len(requests()), width)]
        for name, how in (("greedy", Sampling(temperature=0.0, max_tokens=16)), ("seeds", SAMPLING)):
            result[name] = {c.id: (c.token_ids, c.logprobs, c.versions) for c in engine.generate(wanted, how)}
        if ranks.rank == ranks.world - 1 and width > 1:
            with pytest.raises(EngineError, match="another rank"):
                engine.generate(requests(), SAMPLING)
        result["freed"] = take_back(policy, engine)
        hand_over(policy, engine, 2, verify=True)  # in one bucket
        again = {c.id: c.token_ids for c in engine.generate(wanted, Sampling(temperature=0.0, max_tokens=16))}
        result["again"] = again == {i: out[0] for i, out in result["greedy"].items()}
        load = engine.update_weights
        if ranks.rank == ranks.world - 1:  # an error of one rank stops its team, and no one waits
            engine.update_weights = lambda buckets, version: load(
                ({f"{n}.more": t for n, t in b.items()} for b in buckets), version
            )
        with pytest.raises(EngineError, match=r"unknown name .*\.more"):
            hand_over(policy, engine, 3)
    finally:
        engine.close()
    return result


@pytest.mark.parametrize(
    ("name", "world", "width"),
    [
        ("qwen3", 2, 1),
        ("qwen3", 2, 2),  # q, k and v are three matrices that SGLang stacks and cuts
        ("phi3", 2, 2),  # and here one that it cuts
    ],
)
def test_ranks_sample_what_one_would(folder_of, make_engine, name: str, world: int, width: int) -> None:
    folder, other = folder_of(name), folder_of(name, seed=1)
    results = on_ranks(world, sampled, folder, other, width, timeout=300.0)  # engines start in it
    greedy = {i: out for result in results for i, out in result["greedy"].items()}
    assert {i: out[0] for i, out in greedy.items()} == expected(folder)
    assert {tuple(map(tuple, out[2])) for out in greedy.values()} == {((1, 16),)}
    assert all(result["moved"] and result["again"] for result in results)
    assert [bool(result["greedy"]) for result in results] == [rank % width == 0 for rank in range(world)]
    assert all(result["freed"] > 0 for result in results[::width])
    one = collect(make_engine(folder), requests(), SAMPLING)
    seeds = {i: out for result in results for i, out in result["seeds"].items()}
    assert {i: out[0] for i, out in seeds.items()} == {i: c.token_ids for i, c in one.items()}
    for i, c in one.items():
        assert seeds[i][1] == pytest.approx(c.logprobs, abs=1e-5)


def test_the_recipe_on_a_team_of_two_ranks(tmp_path: Path) -> None:
    """As a user starts it; each handover is compared, and what was sampled has the trainer's probabilities."""
    command = [
        sys.executable,
        "-m",
        "hybrid_rl.run",
        "+recipe=reverse",
        "engine=sglang",
        f"output_dir={tmp_path}",
        "ranks=2",
    ]
    small = [
        "sft.steps=30",
        "rl.steps=2",
        "rl.max_empty_steps=0",
        "eval.max_tasks=16",
        "engine.tensor_parallel=2",
        "handover.verify=true",
    ]
    environment = os.environ | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    result = subprocess.run(
        [*command, *small, "rollout.max_tokens=32"], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 ranks on cpu" in result.stdout
    (metrics,) = tmp_path.glob("reverse/*/metrics.jsonl")
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["stage"] == "rl"]
    assert len(steps) == 2
    assert all(step["mismatch_kl"] < 1e-6 and step["engine_restarts"] == 0 for step in steps)
    assert all(step["cache_hit_rate"] > 0.8 for step in steps)  # a group's prompt is computed once
