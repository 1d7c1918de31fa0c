"""Preallocate keys and values, and define the two attention layouts that fill and read them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.attention.attend import LayerAttention, Packed, softmax


class KVCache:
    """Keys and values, [layers][slots, K, capacity, D]; slot s holds `lengths[s]` tokens, from position 0 on.

    The arguments `keys` and `values` give each layer's shape of one prompt, [K, P, D]: layers may differ in heads and
    sizes.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        keys: list[torch.Size],
        values: list[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.keys = [_zeros((slots, heads, capacity, dim), dtype, device) for heads, _, dim in keys]
        self.values = [_zeros((slots, heads, capacity, dim), dtype, device) for heads, _, dim in values]
        self.bias = torch.full((slots, capacity), float("-inf"), dtype=dtype, device=device)  # 0 where a token is
        self.lengths = np.zeros(slots, dtype=np.int64)  # on the host, where the schedule is made
        self.rows = torch.arange(slots, device=device)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values, self.bias))

    def store(self, slots: list[int], keys: list[Tensor], values: list[Tensor]) -> None:
        """Write one prefix, [K, P, D] per layer, into each of the slots: all samples of a group share its prompt."""
        length = keys[0].shape[1]
        index = torch.tensor(slots, device=self.rows.device)
        for cache, new in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            cache[index, :, :length] = new.to(cache.dtype)
        self.bias[index] = float("-inf")
        self.bias[index, :length] = 0.0
        self.lengths[slots] = length

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy slots: the last active ones fill the gaps that finished ones left."""
        longest = int(self.lengths[source].max())
        here, there = torch.tensor([source, target], device=self.rows.device)
        for tensor in (*self.keys, *self.values):
            tensor[there, :, :longest] = tensor[here, :, :longest]
        self.bias[there] = self.bias[here]
        self.lengths[target] = self.lengths[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: masked positions are multiplied by weight 0, and with uninitialised memory 0 · NaN would be NaN.

    On the CPU they come from numpy, whose zero pages take no memory until they are touched; most of a cache never is.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)


class Prefill(Packed):
    """Packed causal attention over several prompts; keeps the keys and values of each, [K, P, D] per layer."""

    def __init__(self, lengths: list[int]):
        super().__init__(lengths)
        self.keys: list[tuple[Tensor, ...]] = []  # [layer][prompt]
        self.values: list[tuple[Tensor, ...]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self.keys.append(key[0].split(self.lengths, dim=1))
        self.values.append(value[0].split(self.lengths, dim=1))
        return super().attend(layer, query, key, value, how)


class Decode:
    """Attention for one new token in each of the first `rows` slots; its key and value join the cache."""

    def __init__(self, cache: KVCache, rows: int):
        self.cache, self.index = cache, cache.rows[:rows]
        self._oldest, longest = int(cache.lengths[:rows].min()), int(cache.lengths[:rows].max()) + 1
        self.positions = torch.from_numpy(cache.lengths[:rows].copy()).to(cache.rows.device)
        cache.bias[self.index, self.positions] = 0.0
        cache.lengths[:rows] += 1
        self._biases: dict[int | None, tuple[int, Tensor]] = {None: (0, cache.bias[:rows, None, None, :longest])}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.index, :, self.positions] = key[:, :, 0].to(keys.dtype)
        values[self.index, :, self.positions] = value[:, :, 0].to(values.dtype)
        n, heads, _, dim = query.shape
        first, bias = self._reach(how.window)
        keys, values = (cache[:n, :, first : first + bias.shape[-1]] for cache in (keys, values))
        # the heads that share a key/value head become its queries, so that keys are never repeated in memory
        grouped = (query * how.scaling).to(keys.dtype).view(n, keys.shape[1], -1, dim)
        weights = softmax(grouped @ keys.transpose(-1, -2), bias, how)
        return (weights @ values).reshape(n, 1, heads, -1).to(query.dtype)

    def _reach(self, window: int | None) -> tuple[int, Tensor]:
        """Return the first position in any row's window, and the bias [n, 1, 1, L] of the positions from there on."""
        _, bias = self._biases[None]
        if window is None or window >= bias.shape[-1]:
            return self._biases[None]
        if window not in self._biases:  # once for all layers that have it
            first = max(0, self._oldest - window + 1)
            at = torch.arange(first, bias.shape[-1], device=bias.device)
            past = at <= self.positions[:, None] - window
            self._biases[window] = first, bias[..., first:].masked_fill(past[:, None, None], float("-inf"))
        return self._biases[window]

    def to(self, device: object) -> Decode:
        return self
