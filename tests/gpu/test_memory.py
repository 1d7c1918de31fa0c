"""Memory of a GPU, given back to the byte; and what waits on the host, bit for bit. On a CPU the bytes are those of storages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.algo.ppo_clip import loss as ppo_loss
from hybrid_rl.config import Offload, OptimizerConfig, PolicyConfig, Precision
from hybrid_rl.engine.base import Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import make_optimizer
from hybrid_rl.policy.sharding import local
from tests.device import DEVICE, ON_GPU
from tests.policy.test_sharding import ADVANTAGES, rollouts
from tests.updates import update

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="counts the bytes of a GPU's allocator")


@pytest.fixture
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def turns(policy: Policy, engine: LocalEngine, optimizer, first: int, last: int) -> list[tuple[int, int]]:
    """Bytes allocated after each turn of sampling and training, and while the engine sampled."""
    used = []
    for version in range(first, last):
        hand_over(policy, engine, version, optimizer, verify=version == 0)
        list(engine.generate([Request(i, [5, 9, 11], i) for i in range(8)], Sampling(max_tokens=8)))
        sampling = torch.cuda.memory_allocated() if ON_GPU else 0
        take_back(policy, engine, optimizer)
        update(policy, optimizer, rollouts(seed=version), ADVANTAGES, ppo_loss, 1.0)
        used.append((sampling, torch.cuda.memory_allocated() if ON_GPU else 0))
    return used


@needs_gpu
@pytest.mark.parametrize("offload", list(Offload))
@pytest.mark.parametrize("dtype", [Precision.float32, Precision.bfloat16])
def test_turns_keep_no_byte(tiny_folder, group, dtype: Precision, offload: Offload) -> None:
    policy = Policy.load(tiny_folder, DEVICE, PolicyConfig(dtype=dtype, offload=offload))
    engine = LocalEngine(policy.sampler, policy.end_ids(), 8, 64, DEVICE, policy.dtype)
    optimizer = make_optimizer(policy, OptimizerConfig(), 20)
    turns(policy, engine, optimizer, 0, 3)  # what is allocated once: workspaces of libraries, caches of FSDP
    used = turns(policy, engine, optimizer, 3, 9)
    assert len({after for _, after in used}) == 1
    assert len({sampling for sampling, _ in used}) == 1


@needs_gpu
def test_sleep_gives_the_bytes_of_the_cache_back(tiny_folder) -> None:
    policy = Policy.load(tiny_folder, DEVICE, PolicyConfig(dtype=Precision.float32))
    engine = LocalEngine(policy.sampler, policy.end_ids(), 64, 4096, DEVICE, policy.dtype)
    ask = lambda: list(engine.generate([Request(0, [5, 9], 0)], Sampling(max_tokens=2)))  # noqa: E731
    hand_over(policy, engine, 0)
    ask()
    engine.sleep()
    engine.wake()
    ask()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    freed = engine.sleep()
    assert freed == engine.stats.peak_kv_bytes > 60 * 2**20
    assert allocated - torch.cuda.memory_allocated() == pytest.approx(freed, abs=4096)  # and the rows' numbers
    assert reserved - torch.cuda.memory_reserved() >= 0.9 * freed  # other processes can have it


@pytest.mark.parametrize("dtype", [Precision.float32, Precision.bfloat16])
def test_what_is_parked_comes_back_bit_for_bit(tiny_folder, group, dtype: Precision) -> None:
    policy = Policy.load(tiny_folder, DEVICE, PolicyConfig(dtype=dtype, offload=Offload.all))
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-3), 20)
    update(policy, optimizer, rollouts(), ADVANTAGES, ppo_loss, 1.0)
    held = [*map(local, policy.parameters.values()), *map(local, optimizer.tensors().values())]
    before, allocated = [t.detach().clone() for t in held], torch.cuda.memory_allocated() if ON_GPU else 0
    for _ in range(3):
        policy.park()
        optimizer.park()
        moments = [local(t) for n, t in optimizer.tensors().items() if not n.endswith(".step")]
        assert all(t.untyped_storage().size() == 0 for t in moments)
        if ON_GPU:
            waiting = moments + ([*map(local, policy.parameters.values())] if policy.waits() else [])
            assert allocated - torch.cuda.memory_allocated() >= sum(t.nbytes for t in waiting)
        optimizer.unpark()
        policy.unpark()
        assert all(torch.equal(now, then) for now, then in zip(held, before, strict=True))
        assert not ON_GPU or torch.cuda.memory_allocated() == allocated
