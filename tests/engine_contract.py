"""What every engine must do, written against the `Engine` protocol alone.

A test module of an engine subclasses `EngineContract` and gives the fixture `make_engine`: (folder, slots=8, capacity=64)
→ an engine with the folder's weights at version 0, of which one is in use at a time: the next may be the same one with other weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, Completion, Engine, EngineError, Request, Sampling

MakeEngine = Callable[..., Engine]
PROMPTS = [[5], [70, 71], list(range(40, 49)), [200, 3, 3, 3, 120], list(range(100, 130))]


def requests(groups: int = 5, size: int = 4, first_seed: int = 0) -> list[Request]:
    return [
        Request(g * size + i, PROMPTS[g], seed=first_seed + g * size + i) for g in range(groups) for i in range(size)
    ]


def collect(engine: Engine, wanted: list[Request], sampling: Sampling) -> dict[int, Completion]:
    """Completions by request id, in the order in which they finished; each request once."""
    completions = list(engine.generate(wanted, sampling))
    assert sorted(c.id for c in completions) == sorted(r.id for r in wanted)
    return {c.id: c for c in completions}


def tokens(completions: dict[int, Completion]) -> dict[int, list[int]]:
    return {i: completions[i].token_ids for i in sorted(completions)}


def checkpoint(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


class EngineContract:
    tolerance = 1e-5  # of a log-probability, in nats; an engine of lower precision sets its own
    dtype = torch.float32  # of the engine's weights
    rounding = 0.0  # of a log-probability, where the same requests are sampled again under the same weights
    memory_tolerance = 0.0  # share by which the bytes freed may differ from cycle to cycle

    @pytest.fixture
    def engine(self, make_engine: MakeEngine, tiny_folder: Path) -> Engine:
        return make_engine(tiny_folder)

    # ---- the numbers -------------------------------------------------------------------------------------------------

    def test_greedy_tokens_are_those_of_transformers(
        self, make_engine: MakeEngine, any_folder: Path, reference_of
    ) -> None:
        out = collect(make_engine(any_folder), requests(size=1), Sampling(temperature=0.0, max_tokens=24))
        assert tokens(out) == {i: reference_of(any_folder).greedy(prompt, 24) for i, prompt in enumerate(PROMPTS)}
        for i, c in out.items():
            exact = reference_of(any_folder).logprobs(PROMPTS[i], c.token_ids, 1.0)
            assert c.logprobs == pytest.approx(exact.tolist(), abs=self.tolerance, rel=0)

    @pytest.mark.parametrize("temperature", [0.6, 1.0])
    def test_logprobs_are_at_the_sampling_temperature(
        self, make_engine, any_folder: Path, reference_of, temperature: float
    ) -> None:
        out = collect(make_engine(any_folder), requests(), Sampling(temperature, max_tokens=16))
        for request in requests():
            exact = reference_of(any_folder).logprobs(request.prompt_ids, out[request.id].token_ids, temperature)
            assert out[request.id].logprobs == pytest.approx(exact.tolist(), abs=self.tolerance, rel=0)

    @pytest.mark.parametrize("sampling", [Sampling(0.6), Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.5)], ids=str)
    def test_first_tokens_have_the_models_distribution(
        self, make_engine, tiny_folder: Path, reference_of, sampling: Sampling
    ) -> None:
        wanted = [Request(i, PROMPTS[2], seed=i) for i in range(2000)]
        out = collect(make_engine(tiny_folder, slots=64), wanted, replace(sampling, max_tokens=1))
        p = reference_of(tiny_folder).distribution(PROMPTS[2], sampling.temperature)[-1].exp().numpy()
        ordered = np.sort(p)[::-1]
        keep = sampling.top_k or (1 + int((ordered.cumsum() < sampling.top_p).sum()) if sampling.top_p < 1 else len(p))
        expected = np.where(p >= ordered[min(keep, len(p)) - 1], p, 0.0)
        expected *= len(wanted) / expected.sum()
        counts = np.bincount([c.token_ids[0] for c in out.values()], minlength=len(p))
        assert counts[expected == 0].sum() == 0
        common = expected >= 5
        statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
        assert statistic < common.sum() + 5 * (2 * common.sum()) ** 0.5

    # ---- one request, one stream -------------------------------------------------------------------------------------

    def test_a_seed_has_its_tokens_whatever_else_runs(self, make_engine: MakeEngine, folder_of) -> None:
        folder, sampling, wanted = folder_of("staggered"), Sampling(max_tokens=16), requests()
        expected = collect(make_engine(folder, slots=64), wanted, sampling)
        assert {c.finish_reason for c in expected.values()} == {"stop", "length"}
        shuffled = random.Random(0).sample(wanted, len(wanted))
        for slots, order in ((1, wanted), (3, wanted), (3, shuffled), (64, shuffled)):
            assert tokens(collect(make_engine(folder, slots=slots), order, sampling)) == tokens(expected)
        engine = make_engine(folder)
        for request in wanted[::3]:  # alone, and again with a prompt that is not shared
            assert collect(engine, [request], sampling)[request.id].token_ids == expected[request.id].token_ids
        fewer = collect(engine, wanted, Sampling(max_tokens=5))
        assert all(fewer[i].token_ids == expected[i].token_ids[:5] for i in expected)

    def test_a_seed_has_its_tokens_whatever_was_sampled_before(self, engine: Engine) -> None:
        expected = tokens(collect(engine, requests(), Sampling(max_tokens=12)))
        for other in (
            Sampling(temperature=0.0, max_tokens=12),
            Sampling(top_k=3, max_tokens=5),
            Sampling(temperature=0.0, max_tokens=1),
        ):
            collect(engine, requests(), other)
            assert tokens(collect(engine, requests(), Sampling(max_tokens=12))) == expected

    def test_other_seeds_give_other_tokens(self, engine: Engine) -> None:
        first, other = (collect(engine, requests(first_seed=seed), Sampling(max_tokens=12)) for seed in (0, 1000))
        same = collect(engine, [Request(i, PROMPTS[2], seed=7) for i in range(3)], Sampling(max_tokens=12))
        assert all(first[i].token_ids != other[i].token_ids for i in first)
        assert len({tuple(c.token_ids) for c in first.values()}) == len(first)
        assert len({tuple(c.token_ids) for c in same.values()}) == 1

    def test_all_end_tokens_end_a_completion_and_are_part_of_it(self, make_engine: MakeEngine, folder_of) -> None:
        """The same weights with more end tokens give the same tokens, cut after the first end token."""
        sampling, ends = Sampling(max_tokens=20), {257, *range(0, 250, 10)}
        whole = collect(make_engine(folder_of("qwen3")), requests(), sampling)
        cut = collect(make_engine(folder_of("staggered"), slots=3), requests(), sampling)
        seen = set()
        for i, c in whole.items():
            end = next((n for n, token in enumerate(c.token_ids) if token in ends), None)
            assert cut[i].token_ids == (c.token_ids if end is None else c.token_ids[: end + 1])
            assert cut[i].finish_reason == ("length" if end is None else "stop")
            assert len(cut[i].logprobs) == len(cut[i].token_ids) == sum(n for _, n in cut[i].versions)
            seen.add(None if end is None else c.token_ids[end])
        assert None in seen
        assert len(seen) > 3

    def test_max_tokens_gives_length(self, make_engine: MakeEngine, folder_of) -> None:
        for limit in (1, 2, 7):
            out = collect(make_engine(folder_of("staggered"), slots=3), requests(), Sampling(max_tokens=limit)).values()
            assert max(len(c.token_ids) for c in out) == limit
            assert all(len(c.token_ids) == limit for c in out if c.finish_reason == "length")

    def test_a_groups_prompt_is_computed_once(self, engine: Engine) -> None:
        lengths = sum(len(p) for p in PROMPTS)
        out = collect(engine, requests(size=16), Sampling(max_tokens=3))  # 80 requests through 8 slots
        assert (engine.stats.prompt_tokens, engine.stats.computed_prompt_tokens) == (16 * lengths, lengths)
        assert engine.stats.cache_hit_rate == pytest.approx(15 / 16)
        assert engine.stats.sampled_tokens == sum(len(c.token_ids) for c in out.values())

    # ---- abort and continue ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("slots", [3, 64])
    @pytest.mark.parametrize("finish_first", [1, 5])
    def test_aborted_then_continued_equals_never_aborted(
        self, make_engine, folder_of, slots: int, finish_first: int
    ) -> None:
        folder, sampling, wanted = folder_of("staggered"), Sampling(0.8, max_tokens=16), requests()
        expected = collect(make_engine(folder), wanted, sampling)
        engine = make_engine(folder, slots=slots)
        done, begun = {}, {}
        for completion in engine.generate(wanted, sampling):
            done[completion.id] = completion
            if len(done) == finish_first:
                begun = {c.id: c for c in engine.abort()}
        assert not done.keys() & begun.keys()
        assert sorted(done.keys() | begun.keys()) == [r.id for r in wanted]
        assert slots == 3 or any(c.token_ids for c in begun.values())  # with 3, all running rows may just have ended
        for i, c in begun.items():
            assert c.finish_reason == "abort"
            assert c.versions == ([(0, len(c.token_ids))] if c.token_ids else [])
            assert c.token_ids == expected[i].token_ids[: len(c.logprobs)]
        engine.update_weights([checkpoint(folder)], version=1)  # the same weights under a new version
        rest = [
            replace(wanted[i], sampled_ids=c.token_ids, sampled_logprobs=c.logprobs, versions=c.versions)
            for i, c in begun.items()
        ]
        continued = collect(engine, rest, sampling)
        assert tokens(done | continued) == tokens(expected)
        for i, c in continued.items():
            old, new = len(begun[i].token_ids), len(c.token_ids) - len(begun[i].token_ids)
            assert c.versions == ([(0, old), (1, new)] if old else [(1, new)])
            assert c.finish_reason == expected[i].finish_reason
            assert c.logprobs[:old] == begun[i].logprobs
            assert c.logprobs == pytest.approx(expected[i].logprobs, abs=2 * self.tolerance)

    def test_a_continued_request_goes_on_under_the_new_weights(self, make_engine, folder_of, reference_of) -> None:
        engine, request = make_engine(folder_of("qwen3")), Request(0, PROMPTS[2], seed=3)
        begun = collect(engine, [request], Sampling(max_tokens=6))[0]
        engine.update_weights([checkpoint(folder_of("qwen3", seed=1))], version=4)
        go_on = replace(request, sampled_ids=begun.token_ids, sampled_logprobs=begun.logprobs, versions=begun.versions)
        ended = collect(engine, [go_on], Sampling(max_tokens=14))[0]
        old, new = (
            reference_of(folder_of("qwen3", seed=seed)).logprobs(PROMPTS[2], ended.token_ids, 1.0) for seed in (0, 1)
        )
        assert ended.token_ids[:6] == begun.token_ids
        assert ended.versions == [(0, 6), (4, 8)]
        assert ended.logprobs == pytest.approx([*old[:6].tolist(), *new[6:].tolist()], abs=self.tolerance)

    def test_another_turn_goes_on_after_what_was_observed(self, make_engine, folder_of, reference_of) -> None:
        """Tokens that nobody sampled stand among those of the request, and only the new ones have a version."""
        folder = folder_of("llama")
        request = Request(0, PROMPTS[1], seed=5)
        engine, sampling = make_engine(folder, capacity=64), Sampling(max_tokens=24)
        first = collect(engine, [request], replace(sampling, max_tokens=6))[0]
        known = [*first.token_ids, 9, 8, 7]
        go_on = replace(request, sampled_ids=known, sampled_logprobs=[*first.logprobs, 0.0, 0.0, 0.0])
        second = collect(engine, [go_on], sampling)[0]
        assert second.token_ids[: len(known)] == known
        new = len(second.token_ids) - len(known)
        assert new > 0
        assert list(second.versions) == [(engine.version, new)]
        exact = reference_of(folder).logprobs([*request.prompt_ids, *known], second.token_ids[len(known) :], 1.0)
        assert second.logprobs[len(known) :] == pytest.approx(exact.tolist(), abs=self.tolerance, rel=0)

    def test_nothing_to_sample_and_nothing_to_abort(self, engine: Engine) -> None:
        assert list(engine.generate([], Sampling(max_tokens=3))) == engine.abort() == []
        assert len(collect(engine, requests(), Sampling(max_tokens=3))) == 20

    def test_a_consumer_that_stops_early_leaves_the_engine_usable(self, make_engine: MakeEngine, folder_of) -> None:
        engine, sampling = make_engine(folder_of("staggered"), slots=3), Sampling(max_tokens=16)
        expected = tokens(collect(engine, requests(), sampling))
        for _ in engine.generate(requests(), sampling):
            break
        assert tokens(collect(engine, requests(), sampling)) == expected
        stream = engine.generate(requests(), sampling)
        next(stream)
        engine.abort()
        old, stream = stream, engine.generate(requests(), sampling)
        assert list(old) == []  # and the end of the old stream does not end the new one
        del old
        assert sorted(c.id for c in stream) == list(range(20))

    @pytest.mark.parametrize("slots", [3, 64])
    def test_pieces_hold_what_generate_yields(self, make_engine: MakeEngine, folder_of, slots: int) -> None:
        """Each completion once, an abort between two pieces included; a piece may be empty."""
        engine, sampling, wanted = make_engine(folder_of("staggered"), slots=slots), Sampling(max_tokens=16), requests()
        expected = collect(engine, wanted, sampling)
        whole = [c for piece in engine.generate_in_pieces(wanted, sampling, 4) for c in piece]
        assert len(whole) == len(wanted)
        assert tokens({c.id: c for c in whole}) == tokens(expected)
        stream, ended = engine.generate_in_pieces(wanted, sampling, 2), []
        while not ended:
            ended += next(stream)
        begun = engine.abort()
        ended += [c for piece in stream for c in piece]
        assert sorted(c.id for c in (*ended, *begun)) == [r.id for r in wanted]
        assert all(c.token_ids == expected[c.id].token_ids for c in ended)
        assert {c.finish_reason for c in begun} <= {"abort"}
        assert all(c.token_ids == expected[c.id].token_ids[: len(c.token_ids)] for c in begun)
        assert list(engine.generate_in_pieces([], sampling, 4)) == []
        with pytest.raises(EngineError, match="empty"):
            engine.generate_in_pieces([Request(7, [], 0)], sampling, 4)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def test_sleep_gives_memory_back_and_wake_goes_on(self, engine: Engine) -> None:
        sampling = Sampling(max_tokens=8)
        expected = tokens(collect(engine, requests(), sampling))
        assert engine.sleep() > 0
        assert engine.sleep() == 0
        with pytest.raises(EngineError, match="sleep"):
            engine.generate(requests(), sampling)
        engine.wake()
        assert tokens(collect(engine, requests(), sampling)) == expected

    def test_waking_one_tag_leaves_the_other_asleep(self, engine: Engine) -> None:
        engine.sleep([KV_CACHE, WEIGHTS])
        engine.wake([WEIGHTS])
        with pytest.raises(EngineError, match="kv_cache"):
            engine.generate(requests(), Sampling(max_tokens=2))
        engine.wake([KV_CACHE, WEIGHTS])  # also what is awake
        assert len(collect(engine, requests(), Sampling(max_tokens=2))) == 20
        for call in (engine.sleep, engine.wake):
            with pytest.raises(EngineError, match="cuda_graph"):
                call(["cuda_graph"])

    def test_sleep_and_new_weights_are_refused_while_requests_run(
        self, engine: Engine, tiny_folder: Path, folder_of
    ) -> None:
        sampling, other = Sampling(max_tokens=8), checkpoint(folder_of("qwen3", seed=1))
        expected = tokens(collect(engine, requests(), sampling))
        stream = engine.generate(requests(), sampling)
        got = [next(stream)]
        new_weights, new_version = partial(engine.update_weights, [other], 1), partial(engine.set_version, 1)
        for call in (engine.sleep, new_weights, new_version, partial(engine.generate, [], sampling)):
            with pytest.raises(EngineError):
                call()
        got += stream  # which goes on as if nothing had been asked
        assert tokens({c.id: c for c in got}) == expected
        assert all(c.versions == [(0, 8)] for c in got if c.finish_reason == "length")

    def test_ten_cycles_keep_the_greedy_tokens(self, engine: Engine, tiny_folder: Path) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=8)
        expected = tokens(collect(engine, requests(size=2), sampling))
        freed = set()
        for version in range(1, 11):
            freed.add(engine.sleep([KV_CACHE, WEIGHTS]))
            engine.wake([WEIGHTS])
            engine.update_weights([checkpoint(tiny_folder)], version)
            engine.wake([KV_CACHE])
            assert engine.version == version
            assert tokens(collect(engine, requests(size=2), sampling)) == expected
        assert max(freed) - min(freed) <= self.memory_tolerance * max(freed)

    # ---- weights -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["qwen3", "llama", "gemma", "phi3"])  # embeddings tied, untied, tied, untied
    def test_after_new_weights_nothing_of_the_old_ones_is_left(
        self, make_engine: MakeEngine, folder_of, name: str
    ) -> None:
        sampling, new = Sampling(max_tokens=8), checkpoint(folder_of(name, seed=1))
        expected = collect(make_engine(folder_of(name, seed=1)), requests(), sampling)
        engine = make_engine(folder_of(name))
        before = collect(engine, requests(), sampling)
        engine.update_weights([{key: new[key]} for key in new], version=1)  # a bucket for each
        after = collect(engine, requests(), sampling)
        assert {v for c in after.values() for v, _ in c.versions} == {engine.version} == {1}
        assert tokens(after) == tokens(expected) != tokens(before)
        for i in expected:
            assert after[i].logprobs == pytest.approx(expected[i].logprobs, abs=self.rounding, rel=0)

    @pytest.mark.parametrize("name", ["qwen3", "llama"])
    @pytest.mark.parametrize("mistake", ["unknown", "shape", "missing", "stopped"])
    def test_a_wrong_update_is_an_error_until_a_whole_one_is_there(
        self, make_engine, folder_of, name: str, mistake: str
    ) -> None:
        engine, sampling = make_engine(folder_of(name)), Sampling(max_tokens=8)
        new = checkpoint(folder_of(name, seed=1))
        wrong, victim = dict(new), "lm_head.weight" if name == "llama" and mistake == "missing" else list(new)[3]
        if mistake == "unknown":
            wrong["model.layers.0.adapter"] = wrong[victim]
        elif mistake == "shape":
            wrong[victim] = torch.cat([wrong[victim]] * 2)
        elif mistake == "missing":
            del wrong[victim]

        def buckets():
            for i, key in enumerate(wrong):
                if mistake == "stopped" and i == 5:
                    raise ConnectionError("the sender went away")
                yield {key: wrong[key]}

        message = {"unknown": "adapter", "shape": victim, "missing": victim, "stopped": "went away"}[mistake]
        with pytest.raises((EngineError, ConnectionError), match=message):
            engine.update_weights(buckets(), version=1)
        with pytest.raises(EngineError, match="update"):
            engine.generate(requests(), sampling)
        assert engine.version == 0
        engine.update_weights([new], version=1)
        assert tokens(collect(engine, requests(), sampling)) == tokens(
            collect(make_engine(folder_of(name, seed=1)), requests(), sampling)
        )

    def test_weights_are_cast_to_the_engines_type_and_can_be_compared(self, make_engine, folder_of) -> None:
        engine, new = make_engine(folder_of("llama")), checkpoint(folder_of("llama", seed=1))
        engine.update_weights([{name: tensor.double() for name, tensor in new.items()}], version=1)
        held = engine.weights()
        assert all(torch.equal(held[name].cpu(), tensor) for name, tensor in new.items())
        assert engine.dtype == self.dtype
        assert not engine.shares(torch.nn.Linear(1, 1))

    def test_a_request_that_cannot_be_served_is_refused_with_its_numbers(self, engine: Engine) -> None:
        too_long, empty = Request(7, list(range(60)), 0), Request(7, [], 0)
        used_up = Request(7, [1], 0, [2] * 10, [-1.0] * 10, [(0, 10)])
        for request, message in (
            (too_long, "request 7.*60.*10.*64"),
            (empty, "request 7.*empty"),
            (used_up, "request 7.*10"),
        ):
            with pytest.raises(EngineError, match=message):
                engine.generate([*requests(), request], Sampling(max_tokens=10))
        longest = Request(99, list(range(54)), seed=1)  # fits exactly
        assert len(collect(engine, [*requests(), longest], Sampling(max_tokens=10))[99].token_ids) <= 10
