"""Free GPU memory while the engine samples: move tensors to the host, and return torch's cached blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

PIECE = 2**30  # bytes of pinned memory in one allocation: torch rounds each up to a power of two


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

    _homes: Sequence[tuple[torch.UntypedStorage, list[Tensor]]] = ()
    _host: Sequence[Tensor] = ()  # pinned memory, kept from one turn to the next: to allocate it takes seconds

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
        sizes = [storage.size() for storage in storages.values()]
        on_gpu = any(storage.device.type == "cuda" for storage in storages.values())
        if sum(sizes) != sum(map(len, self._host)):
            self._host = ()  # the old memory goes before the new one comes
            self._host = _pieces(sum(sizes), pinned=on_gpu)
        self._homes = list(zip(storages.values(), _cut(self._host, sizes), strict=True))
        for storage, places in self._homes:
            for part, place in zip(_bytes(storage).split([*map(len, places)]), places, strict=True):
                place.copy_(part, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        for storage in storages.values():
            storage.resize_(0)

    def unpark(self) -> None:
        """Move the contents back to their device, if they wait.

        On a GPU the next computation waits for it, the host does not.
        """
        for storage, places in self._homes:
            storage.resize_(sum(map(len, places)))
            for part, place in zip(_bytes(storage).split([*map(len, places)]), places, strict=True):
                part.copy_(place, non_blocking=True)
        if not all(piece.is_pinned() for piece in self._host):
            self._host = ()
        self._homes = ()


def _pieces(size: int, pinned: bool) -> list[Tensor]:
    """Return host memory of `size` bytes, uint8, in pieces of PIECE bytes and one of the rest."""
    sizes = [PIECE] * (size // PIECE) + [size % PIECE] * (size % PIECE > 0)
    return [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in sizes]


def _cut(pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Divide the pieces, end to end, into parts of these sizes; a part lies in one piece or in several."""
    parts: list[list[Tensor]] = []
    rest = list(pieces)
    for size in sizes:
        parts.append([])
        while size:
            part = rest[0][:size]
            rest[:1] = [rest[0][size:]] if size < len(rest[0]) else []
            parts[-1].append(part)
            size -= len(part)
    return parts


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
