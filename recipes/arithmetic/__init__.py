"""Add two numbers; the number of digits is the difficulty."""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import Any

EXAMPLE = ({"role": "user", "content": "58 + 31"}, {"role": "assistant", "content": "58 + 31 = 89"})
HELD_OUT = 0.1  # share of all pairs, by a hash: whatever digits, counts and seeds are chosen, the sets never meet


def rows(digits: list[int], count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return `count` different sums, each of a number of digits drawn from `digits`: its column and its source.

    There are few sums of one digit; when they are used up, the rest are longer. Raises ValueError if there are fewer
    than `count` in all.
    """
    random, found = Random(0), dict[tuple[int, ...], int]()
    for _ in range(100 * count):
        size = random.choice(digits)
        pair = tuple(random.randint(0 if size == 1 else 10 ** (size - 1), 10**size - 1) for _ in range(2))
        if (_place(pair) < HELD_OUT) == held_out:
            found.setdefault(pair, size)
        if len(found) == count:
            break
    else:
        raise ValueError(f"there are fewer than {count} sums of {digits} digits; ask for fewer")
    return [
        {
            "prompt": [*EXAMPLE, {"role": "user", "content": f"{a} + {b}"}],
            "answer": a + b,
            "digits": size,
            "source": f"{size} digits",
        }
        for (a, b), size in found.items()
    ]


def _place(pair: tuple[int, ...]) -> float:
    """Return a pair's place from 0 to 1, which does not depend on the order of its numbers."""
    return int.from_bytes(sha256(f"{min(pair)} {max(pair)}".encode()).digest()[:8], "big") / 2**64
