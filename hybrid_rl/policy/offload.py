"""Free GPU memory while the engine samples: move tensors to the host, and return torch's cached blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def release_cached(device: torch.device) -> None:
    """Return torch's cached blocks to the GPU: an engine in another process could not use them otherwise."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class Offloaded(ABC):
    """Base of what can move its tensors to host memory and free their own; every view of them stays valid.

    A subclass says which tensors move (asked at each `park`) and whether any move at all. `park` and `unpark` may be
    repeated.
    """

    _homes: Sequence[tuple[torch.UntypedStorage, Tensor]] = ()

    @abstractmethod
    def waits(self) -> bool:
        """Return whether `park` moves anything."""

    @abstractmethod
    def waiting(self) -> Iterable[Tensor]:
        """Return the tensors to move, plain ones (no DTensors)."""

    def park(self) -> None:
        """Move the contents to host memory, unless they wait there already."""
        if self._homes or not self.waits():
            return
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in self.waiting()) if s.size()}
        self._homes = [(storage, _to_host(storage)) for storage in storages.values()]

    def unpark(self) -> None:
        """Move the contents back to their device, if they wait."""
        for storage, host in self._homes:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
        self._homes = ()


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    """Return the contents [bytes] uint8 in host memory, pinned if they come from a GPU; the storage is empty then."""
    host = torch.empty(storage.size(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    host.copy_(_bytes(storage))
    storage.resize_(0)
    return host


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
