"""What hybrid_rl leans on in torch beside its documented interface: each test names the version that no longer has it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid_rl.policy.torch_private import Loan, all_gather_single, share_buffers
from hybrid_rl.processes.ranks import Ranks
from tests.ranks import on_ranks

BROKEN = f"torch {torch.__version__} changed what hybrid_rl/policy/torch_private.py relies on"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 3, bias=False)
        self.register_buffer("positions", torch.ones(4), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.positions[0]


def test_a_loan_is_the_same_memory_until_it_ends():
    ours = Block()
    with torch.device("meta"):
        theirs = Block()
    empty = theirs.inner.weight
    loan = Loan(theirs, ours)
    assert theirs.inner.weight is ours.inner.weight, BROKEN
    assert dict(theirs.named_parameters()).keys() == {"inner.weight"}, BROKEN
    assert [t.data_ptr() for t in loan.tensors()] == [ours.inner.weight.data_ptr()], BROKEN
    share_buffers(theirs, ours)
    assert theirs.positions is ours.positions, BROKEN
    assert torch.equal(theirs(torch.ones(2)), ours(torch.ones(2))), BROKEN
    loan.end()
    assert theirs.inner.weight is empty, BROKEN
    assert theirs.inner.weight.is_meta, BROKEN


def gathered(ranks: Ranks) -> list[float]:
    out = torch.zeros(2 * ranks.world)
    work = all_gather_single(out, torch.full((2,), float(ranks.rank)), group=ranks.group, async_op=True)
    work.wait()
    return out.tolist()


@pytest.mark.slow
def test_equal_parts_are_gathered_in_the_order_of_ranks():
    assert on_ranks(2, gathered) == [[0.0, 0.0, 1.0, 1.0]] * 2, BROKEN


def test_modules_of_another_build_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        Loan(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
