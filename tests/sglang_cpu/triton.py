"""In place of triton: its kernels can be defined, not launched."""

import placeholder

__version__, __path__, __getattr__ = "3.0.0", [], placeholder.attribute
placeholder.submodules(__name__)


def cdiv(x: int, y: int) -> int:
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
