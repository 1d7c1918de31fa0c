"""In place of torch_memory_saver: memory allocated inside a tagged region can be given back and taken again.

As on a GPU the content is lost unless the region keeps a copy; what comes back is NaN, so that forgetting to fill it shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


@dataclass
class _Block:
    storage: weakref.ref
    tag: str
    keeps: bool
    held: torch.UntypedStorage | None = None  # while paused: the empty storage, kept alive
    size: int = 0
    copy: torch.UntypedStorage | None = None


class _Region(TorchDispatchMode):
    def __init__(self, saver: TorchMemorySaver, tag: str, keeps: bool):
        super().__init__()
        self.saver, self.tag, self.keeps = saver, tag, keeps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        for tensor in tree_flatten(result)[0]:
            if self.saver.recording and isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage.resizable():
                    self.saver.blocks[storage._cdata] = _Block(weakref.ref(storage), self.tag, self.keeps)
        return result


class TorchMemorySaver:
    enabled = True
    hook_mode = "torch"

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.recording = True

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False, **_: object) -> Iterator[None]:
        with _Region(self, tag, enable_cpu_backup):
            yield

    @contextmanager
    def cuda_graph(self, *_: object, **__: object) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        self.recording = False
        try:
            yield
        finally:
            self.recording = True

    def pause(self, tag: str | None = None) -> None:
        for key, block in list(self.blocks.items()):
            storage = block.storage()
            if storage is None or storage._cdata != key:
                del self.blocks[key]
            elif tag in (None, block.tag) and block.held is None:
                block.held, block.size = storage, storage.nbytes()
                block.copy = storage.clone() if block.keeps else None
                storage.resize_(0)

    def resume(self, tag: str | None = None) -> None:
        for block in self.blocks.values():
            if tag in (None, block.tag) and block.held is not None:
                block.held.resize_(block.size)
                if block.copy is not None:
                    block.held.copy_(block.copy)
                else:
                    block.held.fill_(0xFF)
                block.held = block.copy = None


torch_memory_saver = TorchMemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    yield
