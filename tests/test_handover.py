"""Weights from the policy to an engine that shares them, and to one that has its own."""

import ctypes
import shutil
import subprocess
import sys
import time
from functools import partial
from itertools import accumulate
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from hybrid_rl.attention.attend import ATTENTION_NAME
from hybrid_rl.config import OptimizerConfig, TinyConfig
from hybrid_rl.engine.base import EngineError, Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.engine.sglang.engine import given_back
from hybrid_rl.engine.sglang.weights import ModelShapes
from hybrid_rl.handover import HandoverError, hand_over, take_back
from hybrid_rl.policy import offload, tiny
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.offload import Offloaded
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.phases import Phases
from hybrid_rl.types import Rollout
from tests.conftest import WORDS
from tests.device import DEVICE, ON_GPU, in_float32
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow


def engine_of(policy: Policy) -> LocalEngine:
    return LocalEngine(policy.model, policy.end_ids(), 8, 64, policy.device)


@pytest.fixture(params=["qwen3", "llama"])  # tied and untied embeddings
def pair(request, folder_of):
    """A policy, and an engine with a copy of other weights."""
    policy = Policy.load(folder_of(request.param), DEVICE, in_float32())
    other = Policy.load(folder_of(request.param, 1), DEVICE, in_float32())
    return policy, engine_of(other)


@pytest.mark.gpu
def test_shared_memory_needs_no_copy(policy):
    engine = engine_of(policy)
    assert hand_over(policy, engine, 3, verify=True) == 0
    assert engine.version == 3
    assert engine.shares(policy.sampler)


@pytest.mark.gpu
@pytest.mark.parametrize("bucket_bytes", [1, 1024, 2**30])
def test_every_bucket_size_gives_bit_equal_weights(pair, bucket_bytes):
    policy, engine = pair
    moved = hand_over(policy, engine, 1, verify=True, bucket_bytes=bucket_bytes)
    assert moved == sum(t.nbytes for t in policy.parameters.values())
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(engine.weights()[name], tensor)


@pytest.mark.gpu
def test_the_engine_samples_from_the_new_weights(pair):
    policy, engine = pair
    request, greedy = [Request(0, [5, 9, 11], seed=1)], Sampling(temperature=0.0, max_tokens=8)
    hand_over(policy, engine, 1)
    (ours,) = engine_of_version(policy).generate(request, greedy)
    (theirs,) = engine.generate(request, greedy)
    assert theirs.token_ids == ours.token_ids
    assert theirs.logprobs == ours.logprobs
    assert theirs.versions == [(1, len(theirs.token_ids))]


def engine_of_version(policy: Policy) -> LocalEngine:
    engine = engine_of(policy)
    hand_over(policy, engine, 1)
    return engine


@pytest.mark.gpu
def test_verify_finds_a_single_wrong_value(pair):
    policy, engine = pair
    hand_over(policy, engine, 1, verify=True)
    load = engine.update_weights

    def lossy(bucket_list, version):
        load(bucket_list, version)
        name = list(engine.weights())[3]
        engine.weights()[name].view(-1)[5] += 1e-3

    engine.update_weights = lossy
    with pytest.raises(HandoverError, match="differs from the policy's"):
        hand_over(policy, engine, 2, verify=True)


@pytest.mark.gpu
def test_buckets_hold_every_weight_once_and_respect_their_size(policy):
    for size in (1, 5000, 10**9):
        made = list(policy.buckets(torch.float32, size))
        assert [name for b in made for name in b] == list(policy.parameters)
        assert all(len(b) == 1 or sum(t.nbytes for t in b.values()) <= size for b in made)


@pytest.mark.gpu
def test_the_mismatch_of_one_step_is_below_a_millionth(policy):
    """Engine and trainer on the same weights: mean ρ − 1 − log ρ over sampled tokens, float32, T = 1 and T ≠ 1."""
    from hybrid_rl.algo.mismatch import mismatch_kl
    from hybrid_rl.engine.base import Request
    from hybrid_rl.policy.layout import pack, sampled_tokens

    for temperature in (1.0, 0.6):
        engine = engine_of_version(policy)
        rollouts = []
        for c in engine.generate(
            [Request(i, [5, 9, 11], seed=i) for i in range(16)], Sampling(temperature=temperature, max_tokens=32)
        ):
            rollouts.append(Rollout("t", 0, c.id, c.id, [5, 9, 11]))
            rollouts[-1].add_sampled(c.token_ids, c.logprobs, c.versions)
        tokens = sampled_tokens(rollouts, DEVICE)
        row = pack(rollouts, "trees", 2048)[0].to(DEVICE)
        with torch.no_grad():
            logprobs, _ = policy.logprobs(row, temperature)
        assert mismatch_kl(logprobs, tokens.behaviour_logprobs[row.token_index]).mean() < 1e-6


# ---- several ranks ---------------------------------------------------------------------------------------------------


def stranger(folder: Path, dtype: torch.dtype = torch.float32) -> LocalEngine:
    """An engine with memory of its own, as an inference server has."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return LocalEngine(model.eval().to(DEVICE), frozenset([257]), 8, 64, DEVICE, dtype)


def received(
    ranks: Ranks, folder: Path, other: Path, bucket_bytes: int, shard: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    policy, engine = Policy.load(folder, DEVICE, in_float32(shard=shard), ranks), stranger(other, dtype)
    hand_over(policy, engine, 1, verify=True, bucket_bytes=bucket_bytes)
    assert engine.version == 1
    take_back(policy, engine)
    return {name: tensor.cpu().clone() for name, tensor in engine.weights().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt_neox"])  # tied, untied, with biases
@pytest.mark.parametrize(("world", "shard"), [(1, 0), (2, 0), (3, 0), (4, 2)])
@pytest.mark.parametrize("bucket_bytes", [1024, 2**30])
def test_shards_arrive_whole_and_bit_equal(folder_of, name, world, shard, bucket_bytes):
    folder, other = folder_of(name), folder_of(name, 1)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        for weights in on_ranks(world, received, folder, other, bucket_bytes, shard, dtype):
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[n], tensor.to(dtype)) for n, tensor in expected.items())


def broken_on_one(ranks: Ranks, folder: Path, mistake: str) -> tuple[str, float, bool]:
    policy, engine = Policy.load(folder, DEVICE, in_float32(), ranks), stranger(folder)
    load = engine.update_weights
    if ranks.rank == 1:

        def wrong(buckets, version):
            for i, bucket in enumerate(buckets):
                if mistake == "crash" and i == 2:
                    raise MemoryError("no room for the bucket")
                name = next(iter(bucket))
                if mistake != "crash":
                    load([{f"{name}.extra": bucket[name]} if mistake == "name" else {name: torch.zeros(3, 3)}], version)

        engine.update_weights = wrong
    since = time.perf_counter()
    try:
        hand_over(policy, engine, 5, bucket_bytes=1024)
    except (EngineError, MemoryError) as error:
        took, message = time.perf_counter() - since, str(error)
        engine.update_weights = load
        hand_over(policy, engine, 6, verify=True)  # whatever happened, the next one finds all ranks in step
        return message, took, engine.version == 6
    return "no error", 0.0, False


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mistake", "message"), [("name", "unknown name"), ("shape", "has shape"), ("crash", "no room for the bucket")]
)
def test_an_error_on_one_rank_is_raised_on_all_and_nobody_waits(tiny_folder, mistake, message):
    for error, seconds, recovered in on_ranks(3, broken_on_one, tiny_folder, mistake):
        assert message in error
        assert seconds < 10
        assert recovered


def wrong_after(ranks: Ranks, folder: Path) -> str:
    policy = Policy.load(folder, DEVICE, in_float32(), ranks)
    engine = LocalEngine(policy.sampler, policy.end_ids(), 8, 64, policy.device)
    set_version = engine.set_version

    def spoil(version):
        set_version(version)
        if ranks.rank == 1:
            with torch.no_grad():
                engine.weights()["model.norm.weight"][3] += 1e-4

    engine.set_version = spoil
    try:
        hand_over(policy, engine, 1, verify=True)
    except HandoverError as error:
        return str(error)
    return "nothing"


@pytest.mark.gpu
def test_verify_finds_a_wrong_value_in_unsharded_parameters(tiny_folder):
    assert (
        on_ranks(2, wrong_after, tiny_folder)
        == ["after the handover of version 1 the engine's model.norm.weight differs from the policy's"] * 2
    )


BIG = TinyConfig(layers=6, hidden_size=512, intermediate_size=2048, heads=8, kv_heads=8, head_dim=64, words=WORDS)


@pytest.fixture(scope="module")
def big_folder(tmp_path_factory) -> Path:
    """25 M parameters, 102 MB: large against what else a process allocates."""
    folder = tmp_path_factory.mktemp("big")
    tiny.create(folder, BIG, 0)
    return folder


def resident() -> int:
    """Bytes, without those that the allocator only keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def peak_of(what) -> tuple[int, int]:
    """Bytes by which the resident set rose while `what` ran, and those it kept."""
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest value so far
    what()
    highest = (
        next(
            int(line.split()[1])
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        * 1024
    )
    return highest - before, resident() - before


def allocated(what) -> tuple[int, int]:
    """Bytes of tensors by which memory rose while `what` ran, and those kept: what torch's allocator recorded, the transport's too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        what()
    events = recorded.profiler.kineto_results.events()
    course = list(
        accumulate(n for _, n in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"))
    )
    return max(course), course[-1]


def peaks(ranks: Ranks, folder: Path) -> dict[str, tuple[int, int]]:
    policy, engine = Policy.load(folder, DEVICE, in_float32(), ranks), stranger(folder)
    own = LocalEngine(policy.sampler, policy.end_ids(), 8, 64, policy.device)
    hand_over(policy, engine, 1, bucket_bytes=2**20)  # what is allocated once
    hand_over(policy, own, 1)
    take_back(policy, own)
    return {
        "small": allocated(partial(hand_over, policy, engine, 2, bucket_bytes=8 * 2**20)),
        "whole": allocated(partial(hand_over, policy, engine, 3, bucket_bytes=2**30)),
        "in place": allocated(partial(hand_over, policy, own, 4)),
        "given back": allocated(partial(take_back, policy, own)),
    }


def test_peak_memory_is_shard_and_bucket_and_engine(big_folder):
    size = sum(t.nbytes for t in load_file(big_folder / "model.safetensors").values())
    transport = size / 4  # gloo stages the tensors under way, two layers' worth at most
    for rank in on_ranks(2, peaks, big_folder):
        peak, kept = ({what: result[side] for what, result in rank.items()} for side in (0, 1))
        assert 7 * 2**20 < peak["small"] < 8 * 2**20 + transport
        assert size <= peak["whole"] < size + transport
        assert size <= peak["in place"] < size + 3 * transport  # a unit's shards lie beside it while it is put together
        assert (
            -1.15 * size < kept["given back"] < -0.99 * size
        )  # all of it, and now and then a bucket that was let go late


def loaded(ranks: Ranks, tiny_folder: Path, folder: Path) -> tuple[int, int]:
    kept = []
    for each in (tiny_folder, folder):  # the first imports what loading needs
        result = peak_of(lambda each=each: kept.append(Policy.load(each, DEVICE, in_float32(), ranks)))
    return result


def test_only_rank_0_ever_holds_a_whole_model_while_it_loads(tiny_folder, big_folder):
    size = sum(t.nbytes for t in load_file(big_folder / "model.safetensors").values())
    first, second, third = on_ranks(3, loaded, tiny_folder, big_folder)
    assert first[0] > 0.9 * size
    for peak, kept in (second, third):  # a third of the parameters, and one of them whole at a time
        assert kept < 0.45 * size
        assert peak < 0.6 * size


# ---- memory over time ------------------------------------------------------------------------------------------------


def cycles(ranks: Ranks, folder: Path) -> list[int]:
    policy = Policy.load(folder, DEVICE, in_float32(), ranks)
    engine, optimizer = (
        LocalEngine(policy.sampler, policy.end_ids(), 8, 64, policy.device),
        Optimizer(policy.trainable, OptimizerConfig(), 1, 1),
    )
    used = []
    for version in range(25):
        hand_over(policy, engine, version, optimizer)
        list(engine.generate([Request(i, [5, 9, 11], i) for i in range(8)], Sampling(max_tokens=8)))
        take_back(policy, engine, optimizer)
        used.append(resident())
    return used


@pytest.mark.parametrize("world", [1, 2])
def test_25_cycles_do_not_grow_memory(big_folder, world):
    for used in on_ranks(world, cycles, big_folder):
        assert (
            min(used[-5:]) - min(used[:5]) < 96 * 2**20
        )  # the transport keeps a few buffers; one layer kept a cycle would be 250 MB


def test_ten_cycles_on_one_rank_leave_no_tensor_behind(big_folder):
    policy = Policy.load(big_folder, DEVICE, in_float32())
    engine, optimizer = engine_of(policy), Optimizer(policy.trainable, OptimizerConfig(), 1, 1)

    def turns(first: int, last: int) -> None:
        for version in range(first, last):
            hand_over(policy, engine, version, optimizer)
            list(engine.generate([Request(i, [5, 9, 11], i) for i in range(8)], Sampling(max_tokens=8)))
            take_back(policy, engine, optimizer)

    turns(0, 3)
    assert allocated(partial(turns, 3, 13))[1] == 0


def test_phases_record_memory_before_and_after_and_add_up():
    phases, kept = Phases(torch.device("cpu")), []
    resident()  # what earlier tests left to the allocator would be taken again
    with phases("grow"):
        kept.append(torch.ones(2**25))  # 128 MiB
    with phases("shrink"):
        kept.clear()
    before, after = phases.memory["grow"]
    assert after - before == pytest.approx(0.125, abs=0.01)
    assert phases.memory["shrink"][1] - phases.memory["shrink"][0] == pytest.approx(-0.125, abs=0.01)
    assert phases.peak_gib == max(after, phases.memory["shrink"][0])
    assert phases.total == sum(phases.seconds.values()) > 0


@pytest.mark.gpu
def test_parked_tensors_give_their_memory_back_and_return_bit_equal():
    base = torch.randn(1000, device=DEVICE)
    view, other = base[100:200].view(10, 10), torch.randn(7, device=DEVICE).bfloat16()
    expected = [t.clone() for t in (base, view, other)]

    class Three(Offloaded):
        def waits(self):
            return True

        def waiting(self):
            return [view, base, other]

    three = Three()
    three.unpark()
    for _ in range(2):
        three.park()
        assert base.untyped_storage().size() == other.untyped_storage().size() == 0
    three.unpark()
    three.unpark()
    assert all(torch.equal(t, e) for t, e in zip((base, view, other), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1, 64, 100, 2**30])
def test_what_waits_lies_in_pieces_of_any_size(piece, monkeypatch):
    """A tensor may lie across pieces; on a GPU they are pinned, and the next turn uses them again."""
    monkeypatch.setattr(offload, "PIECE", piece)
    tensors = [
        torch.randn(n, device=DEVICE).to(dtype)
        for n, dtype in ((3, torch.float64), (40, torch.bfloat16), (1, torch.float32))
    ]
    expected = [t.clone() for t in tensors]

    class Some(Offloaded):
        def waits(self):
            return True

        def waiting(self):
            return tensors

    some, hosts = Some(), []
    for _ in range(3):
        some.park()
        assert all(len(host) <= piece and host.is_pinned() == ON_GPU for host in some._host)
        assert sum(map(len, some._host)) == sum(t.nbytes for t in expected) if not ON_GPU else True
        hosts.append([host.data_ptr() for host in some._host])
        some.unpark()
        assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True))
    assert some._host == () if not ON_GPU else hosts[0] == hosts[2]
    tensors.append(torch.ones(7, device=DEVICE))  # more waits now
    some.park()
    some.unpark()
    assert torch.equal(tensors[-1].cpu(), torch.ones(7))


def test_a_tied_matrix_stored_under_both_names_is_one(tmp_path, tiny_folder):
    """As in some published checkpoints: the policy has one parameter, and hands it over once."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    before = ModelShapes.read(tmp_path / "model")
    assert before.tied
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert ModelShapes.read(tmp_path / "model") == before
    policy = Policy.load(tmp_path / "model", DEVICE, in_float32())
    names = {
        before.own_name(name, tensor)
        for bucket in policy.buckets(torch.float32, 2**20)
        for name, tensor in bucket.items()
    }
    assert names == set(before.shapes)
    assert before.weight_bytes(torch.float32) == sum(tensor.nbytes for tensor in weights.values())


HOLDS = 64 * 2**20
HOLDER = f"import mmap, time\nheld = mmap.mmap(-1, {HOLDS})\nheld.write(b'1' * {HOLDS})\nprint(flush=True)\ninput()\ntime.sleep(0.3)\nheld.close()\ninput()"


@pytest.fixture
def holder():
    """A process with 64 MiB, which it gives back a third of a second after it is told to."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_memory_that_comes_late_is_waited_for(holder):
    used = lambda: psutil.Process(holder.pid).memory_info().rss  # noqa: E731
    before = used()
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert before - used() < HOLDS / 2, "it is not free yet"
    assert given_back(used, before, HOLDS, 10.0) == pytest.approx(HOLDS, rel=0.1)


def test_memory_that_never_comes_is_an_error_with_its_bytes(holder):
    used = lambda: psutil.Process(holder.pid).memory_info().rss  # noqa: E731
    start = time.monotonic()
    with pytest.raises(
        EngineError, match=r"given back 0\.06 GiB, and 0\.00 GiB have come free within engine\.timeout=0\.5 s"
    ):
        given_back(used, used(), HOLDS, 0.5)
    assert 0.5 <= time.monotonic() - start < 5
