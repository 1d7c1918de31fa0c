"""What hybrid_rl uses of torch beyond its documented interface; only here, so that a new version breaks one file.

tests/policy/test_private.py names the version that broke it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

# gathers equal parts of all ranks into one tensor; the first name is that since torch 2.13
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Loan:
    """Let `theirs`, an empty module, use the parameters of `ours`, a module of the same structure, in one memory."""

    def __init__(self, theirs: nn.Module, ours: nn.Module):
        # module, attribute, and the empty parameter that belongs there
        self._lent: list[tuple[nn.Module, str, nn.Parameter]] = []
        for borrower, owner in zip(theirs.modules(), ours.modules(), strict=True):
            for name, empty in list(borrower._parameters.items()):
                if empty is not None:
                    self._lent.append((borrower, name, empty))
                    borrower._parameters[name] = owner._parameters[name]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the lent parameters."""
        for module, name, _ in self._lent:
            if (parameter := module._parameters[name]) is not None:
                yield parameter

    def end(self) -> None:
        """Give `theirs` its empty parameters back."""
        while self._lent:
            module, name, empty = self._lent.pop()
            module._parameters[name] = empty


def share_buffers(theirs: nn.Module, ours: nn.Module) -> None:
    """Let `theirs`, a module of the same structure, use the buffers of `ours`, such as positions' frequencies."""
    for borrower, owner in zip(theirs.modules(), ours.modules(), strict=True):
        borrower._buffers.update(owner._buffers)
