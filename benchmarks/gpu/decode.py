"""Sampling with the local engine: tokens/s at 16 to 512 rows, against the bytes that each token must read."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.measuring import GIB, Bench
from hybrid_rl.engine.base import Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over, take_back

PROMPT = 64


def main(bench: Bench) -> None:
    """One wave of requests for each number of rows: all prompts, then every row to its last token."""
    policy = bench.policy("0.6B")
    text = policy.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    for rows in (4, 8) if bench.small else (16, 64, 128, 512):
        tokens = 8 if bench.small else 128
        engine = LocalEngine(policy.sampler, frozenset([0]), rows, PROMPT + tokens, policy.device, policy.dtype)
        engine._ends[:] = False  # every row to its last token
        hand_over(policy, engine, 0)
        prompts = torch.randint(3, policy.vocabulary, (8, PROMPT), generator=generator).tolist()
        asked = [Request(i, prompts[i % 8], seed=i) for i in range(rows)]
        times, waves = [], []
        for _ in range(2):  # the first one allocates
            bench.wait()
            start = time.perf_counter()
            stream = engine.generate(asked, Sampling(max_tokens=tokens))
            sampled = sum(len(c.token_ids) for c in stream)
            bench.wait()
            times.append(time.perf_counter() - start)
            waves.append(sampled)
        seconds, sampled = times[-1], waves[-1]
        a_token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * policy.dtype.itemsize
        read = policy.parameter_count() * policy.dtype.itemsize + rows * a_token * (PROMPT + tokens / 2)
        # a copy reads and writes, so its rate is that of the bytes that are only read here
        floor = tokens * read / bench.rate("copy")
        cache = engine.stats.peak_kv_bytes / GIB
        bench.row(
            f"{rows} rows",
            sampled / seconds,
            "tokens/s",
            sampled / floor,
            f"{seconds / tokens * 1e3:.2f} ms a token, cache {cache:.2f} GiB",
        )
        take_back(policy, engine)
        engine.close()
