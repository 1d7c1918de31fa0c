"""What hybrid_rl leans on in torch beside its documented interface: here alone, so that a new version breaks one file.

tests/policy/test_private.py names the version that broke it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

# gather equal parts of all ranks into one tensor: its name since torch 2.13, and before
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Loan:
    """The parameters of `theirs`, an empty module, replaced by those of `ours`, a module of the same build: the same
    memory."""

    def __init__(self, theirs: nn.Module, ours: nn.Module):
        self._lent: list[
            tuple[nn.Module, str, nn.Parameter]
        ] = []  # module, attribute, the empty parameter that belongs there
        for borrower, owner in zip(theirs.modules(), ours.modules(), strict=True):
            for name, empty in list(borrower._parameters.items()):
                if empty is not None:
                    self._lent.append((borrower, name, empty))
                    borrower._parameters[name] = owner._parameters[name]

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is lent."""
        for module, name, _ in self._lent:
            if (parameter := module._parameters[name]) is not None:
                yield parameter

    def end(self) -> None:
        """Give `theirs` its empty parameters back."""
        while self._lent:
            module, name, empty = self._lent.pop()
            module._parameters[name] = empty


def share_buffers(theirs: nn.Module, ours: nn.Module) -> None:
    """Let `theirs`, a module of the same build, use the buffers of `ours`: positions' frequencies and the like, in one
    copy."""
    for borrower, owner in zip(theirs.modules(), ours.modules(), strict=True):
        borrower._buffers.update(owner._buffers)
