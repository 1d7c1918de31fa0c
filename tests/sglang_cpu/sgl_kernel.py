"""In place of SGLang's kernels: names to import, and the one function that sampling with seeds calls."""

import torch

MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} is a CUDA kernel, which a CPU cannot run")

    return absent


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64 of each element; int64 arithmetic wraps."""
    x = x + _signed(MIX[0])
    x = (x ^ _shift(x, 30)) * _signed(MIX[1])
    x = (x ^ _shift(x, 27)) * _signed(MIX[2])
    return x ^ _shift(x, 31)


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """32 uniform bits for each row's (seed, position) and each column, [rows, columns]; not Murmur, but as good for sampling."""
    rows = _mix(_mix(seed.view(torch.int64)) ^ positions.long())
    return (_mix(rows[:, None] ^ _mix(cols.long())[None]) & 0xFFFFFFFF).to(torch.uint32)


@murmur_hash32_cpu.register_fake
def _(seed, positions, cols):
    return seed.new_empty((seed.shape[0], cols.shape[0]), dtype=torch.uint32)
