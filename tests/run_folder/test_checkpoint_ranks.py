"""Checkpoints of several ranks: each writes its own rows; any other number of ranks reads them, and all agree on what is wrong."""

import errno
import json
import os
import shutil
import time
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.sharding import make_mesh, shard
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.checkpoint import CheckpointError
from tests.device import DEVICE, ON_GPU, in_float32
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs

# (ranks, ranks that share one copy of the parameters; 0: plain tensors). (4, 2) and (2, 1) have replicas.
LAYOUTS = [(1, 0), (1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (2, 1)]
if ON_GPU:
    LAYOUTS = [(world, size) for world, size in LAYOUTS if world <= torch.cuda.device_count()]


@dataclass
class StandIn:
    """What a checkpoint needs of a policy."""

    ranks: Ranks
    model: nn.Module
    trainable: dict[str, nn.Parameter]


def stand_in(ranks: Ranks, size: int, rows: int = 5) -> StandIn:
    """Dimensions of 5, 1 and 10 rows: over 4 ranks uneven and empty shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 1), nn.Linear(1, 10)).to(DEVICE)
    if size:
        shard(model, {"Linear"}, make_mesh(ranks, size, DEVICE), torch.float32)
    return StandIn(ranks, model, dict(model.named_parameters()))


def mixed(ranks: Ranks, size: int, rows: int = 5) -> StandIn:
    """With bfloat16, and a number that is not sharded."""
    policy = stand_in(ranks, size, rows)
    half = nn.Sequential(nn.Linear(3, 7, dtype=torch.bfloat16)).to(DEVICE)
    if size:
        shard(half, {"Linear"}, make_mesh(ranks, size, DEVICE), torch.bfloat16)
    policy.trainable |= {f"half.{name}": p for name, p in half.named_parameters()} | {
        "number": nn.Parameter(torch.tensor(0.5, device=DEVICE))
    }
    return policy


def optimizer_of(policy: StandIn | Policy) -> Optimizer:
    return Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 10, 3)


def values(name: str, like: Tensor, seed: int) -> Tensor:
    """The whole tensor that goes by this name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.randn(like.shape, generator=generator).to(DEVICE, like.dtype)


@torch.no_grad()
def put(tensors: dict[str, Tensor], seed: int) -> None:
    for name, tensor in tensors.items():
        new = values(name, tensor, seed)
        tensor.copy_(
            distribute_tensor(new, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else new
        )


def wrong(tensors: dict[str, Tensor], seed: int) -> list[str]:
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return [name for name, tensor in whole.items() if not torch.equal(tensor, values(name, tensor, seed))]


def save_values(ranks: Ranks, size: int, root: Path, seed: int) -> None:
    policy = mixed(ranks, size)
    optimizer = optimizer_of(policy)
    moments = optimizer.blank()
    put(policy.trainable, seed)
    put(moments, seed)
    optimizer.restore(moments, {**optimizer.state(), "steps": seed})
    checkpoint.save(root, "rl", seed, policy, optimizer, {"rank": ranks.rank}, keep=1)


def restore_values(ranks: Ranks, size: int, roots: dict[int, Path]) -> list[str]:
    policy = mixed(ranks, size)
    errors = []
    for seed, root in roots.items():
        put(policy.trainable, -1)
        optimizer = optimizer_of(policy)
        found = ranks.from_main(lambda root=root: checkpoint.latest(root))
        found.restore_policy(policy)
        found.restore_optimizer(optimizer)
        moments = optimizer.tensors()
        assert len(moments) == 3 * len(policy.trainable)
        errors += [f"{root.name}: {name}" for name in wrong(policy.trainable, seed) + wrong(moments, seed)]
        assert (optimizer.steps, found.state["rank"]) == (seed, 0)
    return errors


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[int, Path]:
    roots = {seed: tmp_path_factory.mktemp(f"saved_on_{world}_by_{size}") for seed, (world, size) in enumerate(LAYOUTS)}
    for seed, (world, size) in enumerate(LAYOUTS):
        on_ranks(world, save_values, size, roots[seed], seed)
    return roots


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "size"), LAYOUTS)
def test_what_any_ranks_saved_comes_back_bit_for_bit_on_any_others(saved, world, size):
    assert on_ranks(world, restore_values, size, saved) == [[]] * world


def test_of_replicas_one_writes(saved):
    for seed, (_, size) in enumerate(LAYOUTS):
        writers = max(1, size)
        names = {
            f"{part}.{i:05d}-of-{writers:05d}.safetensors" for part in ("policy", "optimizer") for i in range(writers)
        }
        assert {f.name for f in (saved[seed] / f"rl_{seed:06d}").iterdir()} == names | {"state.json", "COMPLETE"}


def save_wide(ranks: Ranks, size: int, root: Path) -> None:
    policy = stand_in(ranks, size, rows=10_000)
    checkpoint.save(root, "rl", 1, policy, None, {}, keep=1)


def test_each_rank_writes_its_share(tmp_path):
    on_ranks(4, save_wide, 4, tmp_path)
    sizes = [file.stat().st_size for file in tmp_path.glob("*/policy.*")]
    assert len(sizes) == 4
    assert sum(sizes) > 200_000
    assert max(sizes) < sum(sizes) / 4 + 50_000  # one row of 10,000 numbers cannot be divided


def save_policy(ranks: Ranks, model_folder: Path, root: Path) -> None:
    policy = Policy.load(model_folder, DEVICE, in_float32(), ranks)
    optimizer = optimizer_of(policy)
    moments = optimizer.blank()
    put(policy.trainable, 5)
    put(moments, 5)
    optimizer.restore(moments, optimizer.state())
    checkpoint.save(root, "rl", 1, policy, optimizer, {}, keep=1)


def test_a_real_policys_ties_and_names_are_the_same_on_one_rank(tiny_folder, tmp_path):
    on_ranks(2, save_policy, tiny_folder, tmp_path)
    policy = Policy.load(tiny_folder, DEVICE, in_float32())
    optimizer, found = optimizer_of(policy), checkpoint.latest(tmp_path)
    found.restore_policy(policy)
    found.restore_optimizer(optimizer)
    assert len(optimizer.tensors()) == 3 * len(policy.trainable) > 0
    assert wrong(policy.trainable, 5) + wrong(optimizer.tensors(), 5) == []


# ---- training goes on ------------------------------------------------------------------------------------------------------


def train(policy: StandIn, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        (policy.model(batch).square().mean() / policy.ranks.world).backward()  # gradients are summed over ranks
        optimizer.step()


def numbers(policy: StandIn) -> list[float]:
    return [
        x
        for p in policy.trainable.values()
        for x in (p.full_tensor() if isinstance(p, DTensor) else p).flatten().tolist()
    ]


def train_and_save(ranks: Ranks, size: int, root: Path) -> None:
    policy = stand_in(ranks, size)
    optimizer = optimizer_of(policy)
    train(policy, optimizer, range(3))
    checkpoint.save(root, "rl", 3, policy, optimizer, {}, keep=1)


def restore_and_train(ranks: Ranks, size: int, root: Path) -> list[float]:
    policy = stand_in(ranks, size)
    put(policy.trainable, 0)
    optimizer = optimizer_of(policy)
    found = ranks.from_main(lambda: checkpoint.latest(root))
    found.restore_policy(policy)
    found.restore_optimizer(optimizer)
    train(policy, optimizer, range(3, 6))
    return numbers(policy)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stopped")
    on_ranks(3, train_and_save, 3, root)
    return root


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "size"), [(1, 0), (2, 2), (4, 4), (4, 2)])
def test_training_goes_on_as_if_it_had_never_stopped(stopped, world, size):
    whole = stand_in(Ranks(), 0)
    train(whole, optimizer_of(whole), range(6))
    for found in on_ranks(world, restore_and_train, size, stopped):
        assert found == pytest.approx(numbers(whole), rel=0, abs=1e-6)


# ---- what goes wrong on one rank, all of them say -----------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(ranks: Ranks, root: Path, failing: int, target: str) -> tuple[str, float, list[str]]:
    policy = stand_in(ranks, ranks.world)
    checkpoint.save(root, "rl", 1, policy, None, {}, keep=1)
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught, patch(target, full) if ranks.rank == failing else patch("os.sync"):
        checkpoint.save(root, "rl", 2, policy, None, {}, keep=1)
    seconds = time.perf_counter() - start
    ranks.all_gather(None)  # until rank 0 has removed the folder
    left = sorted(f.name for f in root.iterdir())
    put(policy.trainable, 0)
    ranks.from_main(lambda: checkpoint.latest(root)).restore_policy(policy)
    checkpoint.save(root, "rl", 2, policy, None, {}, keep=1)  # and with room on the disk the next one is written
    return str(caught.value), seconds, left


@pytest.mark.parametrize(
    ("failing", "target"),
    [
        (1, "os.fsync"),
        (1, "hybrid_rl.run_folder.checkpoint.save_file"),
        (0, "os.fsync"),
        (0, "os.replace"),
        (0, "pathlib.Path.mkdir"),
    ],
)
def test_a_full_disk_on_one_rank_is_told_by_all_and_keeps_the_checkpoint_before(tmp_path, failing, target):
    for message, seconds, left in on_ranks(3, fail, tmp_path, failing, target):
        assert "rl_000002 could not be written, the one before is untouched: No space left on device" in message
        assert seconds < 10
        assert left == ["rl_000001"]
    assert [f.name for f in tmp_path.iterdir()] == ["rl_000002"]


def refuse(ranks: Ranks, root: Path, change: str = "") -> str:
    policy = mixed(ranks, ranks.world, rows=6 if change == "shape" else 5)
    if change == "name":
        policy.trainable["other"] = policy.trainable.pop("0.weight")
    if change == "fewer":
        del policy.trainable["0.weight"]
    if change == "more":
        policy.trainable["other"] = policy.trainable["0.weight"]
    with pytest.raises(CheckpointError) as caught:
        ranks.from_main(lambda: checkpoint.latest(root)).restore_policy(policy)
    return str(caught.value)


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A checkpoint of 4 ranks, free to be damaged."""
    return Path(shutil.copytree(saved[4] / "rl_000004", tmp_path / "rl_000004"))


@pytest.mark.parametrize("name", ["policy.00000-of-00004", "policy.00001-of-00004", "optimizer.00003-of-00004"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_every_rank_names_the_damaged_file(folder, name, damage):
    file = folder / f"{name}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "delete":
        file.unlink()
    for message in on_ranks(3, refuse, folder.parent):
        assert f"{file.name} is missing or damaged" in message


def test_a_file_of_another_checkpoint_is_found(folder):
    shutil.copy(folder / "policy.00001-of-00004.safetensors", folder / "policy.00001-of-00002.safetensors")
    for message in on_ranks(2, refuse, folder.parent):
        assert "policy.00001-of-00002.safetensors is not of this checkpoint" in message


@pytest.mark.parametrize("change", ["a file less", "a file twice"])
def test_every_row_must_be_there_once(folder, change):
    """Also where COMPLETE says that all is well."""
    marker, name = json.loads((folder / "COMPLETE").read_text()), "policy.00001-of-00004.safetensors"
    if change == "a file less":
        (folder / name).unlink()
        del marker[name]
    else:
        shutil.copy(folder / name, folder / f"policy.twice.{name}")
        marker[f"policy.twice.{name}"] = marker[name]
    (folder / "COMPLETE").write_text(json.dumps(marker))
    for message in on_ranks(2, refuse, folder.parent):
        assert "do not hold every row of 0.bias once" in message


@pytest.mark.parametrize("change", ["shape", "name", "fewer", "more"])
def test_another_models_weights_are_refused_by_all(saved, change):
    for message in on_ranks(2, refuse, saved[3], change):
        assert message.endswith("holds another model's weights")


def keep_apart(ranks: Ranks, root: Path) -> list[str]:
    """The weights of a frozen reference model have a root of their own."""
    reference, policy = stand_in(ranks, ranks.world), stand_in(ranks, ranks.world)
    put(reference.trainable, 1)
    checkpoint.save(root / "reference", "weights", 0, reference, None, {}, keep=1)
    for step in (1, 2, 3):
        checkpoint.save(root, "rl", step, policy, None, {}, keep=1)
    ranks.from_main(lambda: checkpoint.latest(root / "reference")).restore_policy(policy)
    return wrong(policy.trainable, 1)


def test_a_reference_outlives_the_checkpoints_beside_it(tmp_path):
    assert on_ranks(2, keep_apart, tmp_path) == [[], []]
    assert checkpoint.latest(tmp_path).state["step"] == 3


# ---- which rows ----------------------------------------------------------------------------------------------------------------


class Slices:
    """A tensor that counts the rows read from it, as a file's slice has it."""

    def __init__(self, rows: Tensor):
        self.rows, self.read = rows, 0

    def __getitem__(self, part: slice) -> Tensor:
        self.read += len(self.rows[part])
        return self.rows[part]


@given(rows=st.integers(0, 40), writers=st.integers(1, 9), readers=st.integers(1, 9))
def test_rows_written_by_any_number_are_read_by_any_number(rows, writers, readers):
    whole = torch.arange(rows * 2.0).view(rows, 2)
    held = [checkpoint.chunk(rows, writers, i) for i in range(writers)]
    own = [checkpoint.chunk(rows, readers, i) for i in range(readers)]
    assert [len(part) for part in held if part] == [
        len(part) for part in whole.chunk(writers) if len(part)
    ]  # as FSDP2 splits
    sources = [Slices(whole[part.start : part.stop]) for part in held]
    targets = [torch.full((len(part), 2), -1.0) for part in own]
    for target, part in zip(targets, own, strict=True):
        before = sum(source.read for source in sources)
        for source, piece in zip(sources, held, strict=True):
            checkpoint.copy_rows(target, part, source, piece)
        assert sum(source.read for source in sources) - before == len(part)  # not a row that this rank has no need of
    assert torch.equal(torch.cat(targets), whole)
    assert checkpoint.tiles(reversed(held), rows)


@given(
    cuts=st.lists(st.integers(0, 20), max_size=5),
    change=st.sampled_from(["lost", "twice", "short", "shifted"]),
    data=st.data(),
)
def test_a_missing_or_doubled_row_is_found(cuts, change, data):
    edges = [0, *sorted(cuts), 20]
    pieces = [range(a, b) for a, b in pairwise(edges)]
    assert checkpoint.tiles(pieces, 20)
    changed = data.draw(st.sampled_from([i for i, piece in enumerate(pieces) if piece]))
    piece = pieces[changed]
    if change == "twice":
        pieces.append(piece)
    else:
        pieces[changed] = {
            "lost": range(0, 0), "short": range(piece.start, piece.stop - 1), "shifted": range(piece.start + 1, piece.stop + 1)
        }[change]  # fmt: skip
    assert not checkpoint.tiles(pieces, 20)
