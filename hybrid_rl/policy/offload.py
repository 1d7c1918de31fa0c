"""Memory that a rank gives back while the engine samples: tensors that wait on the host, and torch's cached blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def release_cached(device: torch.device) -> None:
    """What torch has freed but keeps goes back to the GPU: an engine in another process could not have it otherwise."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class Parked:
    """The contents of tensors, held in host memory while their own memory is given back; every view of them stays valid."""

    def __init__(self, tensors: Iterable[Tensor]):
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.size()}
        self._homes: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in storages.values():
            host = torch.empty(storage.size(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self._homes.append((storage, host.copy_(_bytes(storage))))
            storage.resize_(0)

    def bring_back(self) -> None:
        for storage, host in self._homes:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
        self._homes.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
