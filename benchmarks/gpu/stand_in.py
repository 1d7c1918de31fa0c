"""A process that stands where SGLang's scheduler does: it opens each payload as SGLang does, copies it into weights of its own, and
gives memory back in regions of torch_memory_saver if that package is there."""

from __future__ import annotations

import gc
import pickle
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch


def main(connection: Connection, device: str) -> None:
    """Answer ("load", payload), ("hold", bytes), ("pause",), ("resume",), ("end",); the last part of an answer says how it was done."""
    torch.set_num_threads(1)
    weights: dict[str, torch.Tensor] = {}
    held: list[torch.Tensor] = []
    saver, saves = _saver()
    if device == "cuda":
        torch.zeros(1, device=device)
    connection.send(("ready", saves))
    while (message := connection.recv())[0] != "end":
        operation, *rest = message
        if operation == "load":
            _load(rest[0], weights)
        elif operation == "hold":
            held[:] = []
            with saver.region(tag="kv_cache") if saver else nullcontext():
                held.append(torch.ones(rest[0], dtype=torch.uint8, device=device))
        elif operation == "pause":
            if saver:
                saver.pause("kv_cache")
            else:
                size = len(held.pop())
        elif operation == "resume":
            if saver:
                saver.resume("kv_cache")
            else:
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
        if device == "cuda":
            if operation == "pause":
                torch.cuda.empty_cache()
            torch.cuda.synchronize()
        connection.send(("done", saves))


def _load(payload: bytes, weights: dict[str, torch.Tensor]) -> None:
    """Map the flat tensor, view each weight in it, copy; then let go of it, so that the sender's memory is free."""
    bucket: dict[str, Any] = pickle.loads(payload)  # noqa: S301  # from the parent
    flat = bucket["flattened_tensor"]
    for part in bucket["metadata"]:
        view = flat[part.start_idx : part.end_idx].view(part.dtype).view(part.shape)
        if part.name not in weights:
            weights[part.name] = torch.empty_like(view)
        weights[part.name].copy_(view)
    if flat.is_cuda:
        torch.cuda.synchronize()
    del flat, bucket, view
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _saver() -> tuple[Any, str]:
    """Return torch_memory_saver's saver, or None and why plain allocations stand in."""
    try:
        from torch_memory_saver import torch_memory_saver

        return torch_memory_saver, "torch_memory_saver"
    except Exception as error:  # not installed, or its library was not preloaded
        return None, f"plain allocations ({type(error).__name__})"
