"""The engine contract against the real SGLang, on the CPU: `make test-sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_rl.config import EngineKind
from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, EngineError, Request, Sampling
from hybrid_rl.engine.make import choose_engine
from hybrid_rl.engine.sglang.engine import SGLangEngine
from tests.engine_contract import PROMPTS, EngineContract, checkpoint, collect, requests, tokens

SUPPORTED = ["qwen3", "staggered", "llama", "qwen2", "granite", "phi3"]


class TestSGLangEngine(EngineContract):
    rounding = 1e-5  # requests arrive one by one, so batches differ from run to run
    memory_tolerance = 0.05  # what processes have in memory, pages of other things included

    @pytest.fixture(params=SUPPORTED)
    def any_folder(self, request: pytest.FixtureRequest, folder_of) -> Path:
        return folder_of(request.param)

    @pytest.mark.parametrize("name", ["qwen3", "llama", "phi3"])  # embeddings tied, untied, untied
    def test_after_new_weights_nothing_of_the_old_ones_is_left(self, make_engine, folder_of, name: str) -> None:
        super().test_after_new_weights_nothing_of_the_old_ones_is_left(make_engine, folder_of, name)

    def test_a_groups_prompt_is_computed_once(self, engine: SGLangEngine) -> None:
        """And with it, in SGLang, the last token of each request's."""
        out = collect(engine, requests(size=16), Sampling(max_tokens=3))  # 80 requests through 8 slots
        lengths = [len(p) for p in PROMPTS]
        assert engine.stats.prompt_tokens == 16 * sum(lengths)
        assert engine.stats.computed_prompt_tokens == sum(n for n in lengths if n > 1) + 16 * len(lengths)
        assert engine.stats.sampled_tokens == sum(len(c.token_ids) for c in out.values())

    def test_an_abort_while_prompts_are_computed(self, engine: SGLangEngine) -> None:
        expected = tokens(collect(engine, requests(size=16), Sampling(max_tokens=8)))
        engine.set_version(0)
        for _ in range(3):
            stream = engine.generate(requests(size=16), Sampling(max_tokens=8))
            aborted, finished = engine.abort(), list(stream)  # SGLang's process may have finished some by then
            assert sorted(c.id for c in [*aborted, *finished]) == list(range(80))
            assert all(c.token_ids == expected[c.id][: len(c.token_ids)] for c in aborted)
            assert all(c.token_ids == expected[c.id] for c in finished)
        assert tokens(collect(engine, requests(size=16), Sampling(max_tokens=8))) == expected

    def test_waking_one_tag_leaves_the_other_asleep(self, make_engine, tiny_folder: Path) -> None:
        """Weights that slept are gone, and sampling from what is there instead is refused."""
        engine = make_engine(tiny_folder)
        engine.sleep([KV_CACHE, WEIGHTS])
        with pytest.raises(EngineError, match="weights sleep"):
            engine.update_weights([checkpoint(tiny_folder)], version=1)
        engine.wake([WEIGHTS])
        with pytest.raises(EngineError, match="update_weights"):
            engine.generate(requests(), Sampling(max_tokens=2))
        engine.update_weights([checkpoint(tiny_folder)], version=1)
        with pytest.raises(EngineError, match="kv_cache"):
            engine.generate(requests(), Sampling(max_tokens=2))
        engine.wake([KV_CACHE, WEIGHTS])
        assert len(collect(engine, requests(), Sampling(max_tokens=2))) == 20
        for call in (engine.sleep, engine.wake):
            with pytest.raises(EngineError, match="cuda_graph"):
                call(["cuda_graph"])


def test_twenty_turns_change_no_token_and_keep_no_memory(make_engine, folder_of) -> None:
    """Sleep, wake and new weights, two sets of them by turns: the greedy tokens are each set's own, and its processes do not grow."""
    sampling, sets = (
        Sampling(temperature=0.0, max_tokens=8),
        [checkpoint(folder_of("llama", seed=seed)) for seed in (0, 1)],
    )
    engine, resident, seen = make_engine(folder_of("llama")), [], ([], [])
    for version in range(1, 21):
        engine.sleep([KV_CACHE, WEIGHTS])
        engine.wake([WEIGHTS])
        engine.update_weights([sets[version % 2]], version)
        engine.wake([KV_CACHE])
        out = collect(engine, requests(size=2), sampling)
        seen[version % 2].append(tokens(out))
        assert {tuple(c.versions) for c in out.values()} == {((version, 8),)}
        resident.append(engine._host.resident())
    assert all(out == each[0] for each in seen for out in each)
    assert seen[0][0] != seen[1][0]
    assert min(resident[-5:]) - min(resident[2:7]) < 16 * 2**20


@pytest.mark.parametrize("ids", [[5, 100_000], [-1], [320]], ids=str)
def test_an_id_outside_the_vocabulary_is_refused(make_engine, tiny_folder: Path, ids: list[int]) -> None:
    engine = make_engine(tiny_folder)
    for request in (Request(3, ids, 0), Request(3, [1], 0, ids, [-1.0] * len(ids), [(0, len(ids))])):
        with pytest.raises(EngineError, match=r"request 3 .*vocabulary"):
            engine.generate([*requests(), request], Sampling(max_tokens=4))
    assert len(collect(engine, requests(), Sampling(max_tokens=4))) == 20


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "phi3"])
def test_weights_come_back_under_the_checkpoints_names(make_engine, folder_of, name: str) -> None:
    engine, new = make_engine(folder_of(name)), checkpoint(folder_of(name, seed=1))
    engine.update_weights([new], version=1)
    held = engine.weights()
    assert new.keys() <= held.keys()
    assert all(torch.equal(held[key], tensor) for key, tensor in new.items())


def test_a_tied_weight_may_come_under_its_other_name(make_engine, folder_of) -> None:
    engine, new = make_engine(folder_of("qwen3")), checkpoint(folder_of("qwen3", seed=1))
    other = {name if name != "model.embed_tokens.weight" else "lm_head.weight": tensor for name, tensor in new.items()}
    engine.update_weights([other], version=1)
    assert all(torch.equal(engine.weights()[key], tensor) for key, tensor in other.items())
    assert tokens(collect(engine, requests(), Sampling(max_tokens=4))) == tokens(
        collect(make_engine(folder_of("qwen3", seed=1)), requests(), Sampling(max_tokens=4))
    )


@pytest.mark.parametrize("name", ["gemma", "qwen3_moe"])
def test_a_model_that_could_not_be_compared_is_refused(folder_of, name: str) -> None:
    with pytest.raises(EngineError, match=f"{name} in another form.*engine=local"):
        SGLangEngine(folder_of(name), frozenset([257]), 8, 64)


def test_auto_takes_it_on_a_gpu_alone() -> None:
    kinds = {device: choose_engine(EngineKind.auto, torch.device(device)) for device in ("cpu", "cuda")}
    assert kinds == {"cpu": EngineKind.local, "cuda": EngineKind.sglang}
    assert choose_engine(EngineKind.sglang, torch.device("cpu")) == EngineKind.sglang
