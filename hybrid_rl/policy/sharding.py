"""Shard parameters over ranks with FSDP2, fill them, and gather them again.

Each decoder layer is a unit; embeddings and head are the last one. Parameters are float32 shards along their
first dimension; a unit's whole parameters exist, in the compute dtype, only while it computes, or while the engine
samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_rl.policy.torch_private import all_gather_single
from hybrid_rl.processes.ranks import BACKENDS, Ranks, patient


def make_mesh(ranks: Ranks, size: int, device: torch.device) -> DeviceMesh:
    """Return groups of `size` neighbouring ranks that shard one copy of the parameters; several groups are replicas."""
    if not dist.is_initialized():  # one rank in half precision: FSDP does its casts, and needs a group even of one
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    if size == ranks.world:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (ranks.world // size, size), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        patient(group)
    return mesh


def shard(root: nn.Module, layer_classes: set[str], mesh: DeviceMesh, dtype: torch.dtype) -> list[FSDPModule]:
    """Wrap each layer, then `root`, and return the units.

    Gradients are summed over ranks in float32, not averaged: the loss is divided by the whole batch's tokens before
    backward.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    replicas = mesh.ndim == 2 and mesh.size(-1) == 1  # for speed, their units stay whole from forward to backward
    for module in [*(m for m in root.modules() if type(m).__name__ in layer_classes), root]:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False if replicas else None)
    units: list[FSDPModule] = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return units


@torch.no_grad()
def scatter(model: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Fill a sharded `model` from rank 0's `whole`, one tensor at a time, so that no other rank holds two whole."""
    source = dict(whole.named_parameters()) if whole else {}
    for name, parameter in model.named_parameters():
        full = source[name].to(device) if whole else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        sharded: Any = parameter
        parameter.copy_(distribute_tensor(full, sharded.device_mesh, sharded.placements))
    buffers = dict(whole.named_buffers()) if whole else {}
    for name, buffer in model.named_buffers():
        if whole:
            buffer.copy_(buffers[name])
        if dist.get_world_size() > 1:
            dist.broadcast(buffer, src=0)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or the tensor itself: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Gathering:
    """Gather whole tensors from shards, one after another, in one reused buffer of at least `size` bytes.

    A tensor is gathered straight into its place: peak memory is the shards and this buffer.
    """

    def __init__(self, dtype: torch.dtype, size: int, device: torch.device):
        self.dtype, self.size, self.device = dtype, size, device
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def buckets(self, parts: Iterator[tuple[str, Tensor, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Gather `parts` of (name, parameter, this rank's rows of the value to gather), bucket by bucket.

        A bucket's tensors are valid until the next bucket. Collective: every rank must take all buckets.
        """
        waiting: list[tuple[str, Tensor, Tensor]] = []
        held = 0
        for part in parts:
            size = _padded(part[1]) * self.dtype.itemsize
            if waiting and held + size > self.size:
                yield self._gather(waiting, held)
                waiting, held = [], 0
            waiting.append(part)
            held += size
        if waiting:
            yield self._gather(waiting, held)

    @torch.no_grad()
    def _gather(self, parts: list[tuple[str, Tensor, Tensor]], size: int) -> dict[str, Tensor]:
        if all(not isinstance(parameter, DTensor) for _, parameter, _ in parts):
            return {name: rows.detach() for name, _, rows in parts}  # plain tensors; copying casts them
        if self._buffer.nbytes < size:
            self._buffer = torch.empty(size // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        bucket, under_way, start = {}, [], 0
        for name, parameter, rows in parts:
            place = self._buffer[start : start + _padded(parameter)]
            start += len(place)
            whole = place.view(-1, *parameter.shape[1:])
            under_way.append(_gather_rows(whole, rows, parameter))
            bucket[name] = whole[: parameter.shape[0]]
        for work in filter(None, under_way):
            work.wait()
        return bucket


def _gather_rows(out: Tensor, rows: Tensor, parameter: Tensor) -> dist.Work | None:
    """Start gathering all ranks' `rows`, sharded like `parameter`, into `out`, whose first dimension is padded."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    share = len(out) // mesh.size(-1)
    own = out[mesh.get_local_rank(-1) * share :][:share]
    own[: len(rows)].copy_(rows)
    return (
        all_gather_single(out, own, group=mesh.get_group(mesh.ndim - 1), async_op=True) if mesh.size(-1) > 1 else None
    )


def _padded(parameter: Tensor) -> int:
    """Count the elements of the whole parameter with its first dimension rounded up to equal shares."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    shares = parameter.device_mesh.size(-1)
    return -(-parameter.shape[0] // shares) * shares * parameter.shape[1:].numel()
