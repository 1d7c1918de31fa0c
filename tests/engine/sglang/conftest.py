"""Engines with the real SGLang, started once for all tests: a start takes as long as twenty tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, EngineStats
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.engine.sglang.options import SGLangOptions
from hybrid_rl.policy.model import Policy
from tests.engine_contract import checkpoint

KV_TOKENS = 65536  # 32 MiB in the tiny models: enough to be seen in the memory of a process
CAPACITY = 256
ALIVE = 8  # engines at a time; those that wait use no processor
INHERITED = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "2",
}  # no engine may see them: most tests would fail

if importlib.util.find_spec("sglang") is not None:
    os.environ |= INHERITED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="SGLang is not installed here; `make test-sglang` installs it for the CPU")
                )


def start(folder: Path, slots: int = 8, **options) -> SGLangEngine:
    engine = SGLangEngine(
        folder, Policy.load(folder, torch.device("cpu")).end_ids(), slots, CAPACITY, SGLangOptions(**options)
    )
    engine.set_version(0)
    return engine


@pytest.fixture(scope="session")
def engines() -> Iterator[dict[tuple, SGLangEngine]]:
    kept: dict[tuple, SGLangEngine] = {}
    yield kept
    with ThreadPoolExecutor() as pool:  # each takes its seconds
        list(pool.map(SGLangEngine.close, kept.values()))


@pytest.fixture(scope="session")
def make_engine(engines: dict[tuple, SGLangEngine]) -> Callable[..., SGLangEngine]:
    """Return an engine with a folder's weights at version 0: a new one, or one of the same model from before, given these weights.

    There are two for a model at most, with 3 slots (fewer than the contract's requests) and with 64 (more than most).
    """

    def make(folder: Path, slots: int = 8, capacity: int = 64, dtype: torch.dtype = torch.float32) -> SGLangEngine:
        model = [(folder / name).read_text() for name in ("config.json", "generation_config.json")]
        slots = 3 if slots <= 3 else 64
        key = (*model, slots, dtype)
        engine = engines.pop(key, None)
        if engine is not None and not engine._host.dead:
            engine.abort()
            engine.wake([KV_CACHE, WEIGHTS])
            engine.update_weights([checkpoint(folder)], version=0)
            engine.stats = EngineStats()
        else:
            engine = start(folder, slots, dtype=dtype, arguments={"max_total_tokens": KV_TOKENS})
        engine.capacity = capacity
        engines[key] = engine  # now the one used last
        while len(engines) > ALIVE:
            engines.pop(next(iter(engines))).close()
        return engine

    return make
