import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_rl.policy.logprobs import token_cross_entropy, token_logprobs


def problem(
    tokens: int, vocabulary: int, seed: int = 0, scale: float = 1.0, dim: int = 8
) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(tokens, dim, generator=generator)).requires_grad_()
    head = nn.Linear(dim, vocabulary, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, dim, generator=generator))
    return hidden, head, torch.randint(vocabulary, (tokens,), generator=generator)


def by_definition(hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = hidden.detach().double() @ head.weight.detach().double().T / temperature
    weights = (logits - logits.max(-1, keepdim=True).values).exp()
    p = weights / weights.sum(-1, keepdim=True)
    return p[range(len(targets)), targets].log(), -(p * p.clamp_min(1e-300).log()).sum(-1)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_logprobs_and_entropy_are_those_of_the_definition(temperature: float, chunk: int) -> None:
    hidden, head, targets = problem(20, 50)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature, chunk)
    expected, expected_entropy = by_definition(hidden, head, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


@given(
    tokens=st.integers(1, 17),
    chunk=st.integers(1, 20),
    temperature=st.sampled_from([0.6, 1.0]),
    seed=st.integers(0, 99),
)
def test_chunks_change_neither_values_nor_gradients(tokens: int, chunk: int, temperature: float, seed: int) -> None:
    weights = torch.randn(tokens, generator=torch.Generator().manual_seed(seed))
    results = []
    for size in (chunk, tokens):
        hidden, head, targets = problem(tokens, 30, seed)
        logprobs, entropy = token_logprobs(hidden, head, targets, temperature, size)
        (weights * logprobs).sum().backward()
        results.append((logprobs.detach(), entropy, hidden.grad, head.weight.grad))
    for chunked, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_gradient_is_one_hot_minus_probability_over_temperature() -> None:
    hidden, head, targets = problem(6, 11)
    token_logprobs(hidden, head, targets, 0.6, 4)[0].sum().backward()
    p = (hidden.detach().double() @ head.weight.detach().double().T / 0.6).softmax(-1)
    by_logits = (nn.functional.one_hot(targets, 11) - p) / 0.6
    torch.testing.assert_close(hidden.grad.double(), by_logits @ head.weight.detach().double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight.grad.double(), by_logits.T @ hidden.detach().double(), rtol=1e-4, atol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    hidden, head, targets = problem(10, 40, scale=200.0)
    logprobs, entropy = token_logprobs(hidden, head, targets, 0.6, 4)
    logprobs.sum().backward()
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()
    assert hidden.grad.isfinite().all()
    assert (logprobs <= 0).all()
    assert (entropy >= 0).all()


def test_low_precision_logits_are_normalised_in_float32() -> None:
    hidden, head, targets = problem(12, 50)
    low, head = hidden.detach().bfloat16(), head.bfloat16()
    logprobs, _ = token_logprobs(low, head, targets, 0.6, 5)
    expected = (head(low).double() / 0.6).log_softmax(-1)[range(12), targets]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_target_gives_empty_results_and_a_zero_gradient() -> None:
    hidden, head, _ = problem(5, 20)
    logprobs, entropy = token_logprobs(hidden[:0], head, torch.zeros(0, dtype=torch.int64), 1.0, 4)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad.abs().max() == 0
    assert hidden.grad.abs().max() == 0


class Memory(TorchDispatchMode):
    """Bytes of the largest storage that any operation made, and of all those alive at a time, at the highest."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for storage in (t.untyped_storage() for t in tensors):
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.largest = max([self.largest, *(t.nbytes for t in tensors)])
        self.peak = max(self.peak, self.alive)
        return out

    def _freed(self, storage: int, size: int) -> None:
        self.seen.discard(storage)
        self.alive -= size


@pytest.mark.parametrize("chunk", [4, 128])
def test_logits_of_more_than_a_chunk_never_exist(chunk: int) -> None:
    hidden, head, targets = problem(128, 500, dim=2)  # so narrow that the logits outweigh hidden states and head
    with Memory() as memory:
        logprobs, _ = token_logprobs(hidden, head, targets, 0.6, chunk)
        logprobs.sum().backward()
    logits = chunk * 500 * 4
    assert memory.largest == logits
    assert (
        2 * logits <= memory.peak < 7 * logits
    )  # a few chunks alive at a time, forward and backward; the batch has 32


@pytest.mark.parametrize("label_smoothing", [0.0, 0.15])
@pytest.mark.parametrize("chunk", [100, 3])
def test_cross_entropy_is_the_textbook_sum_in_float64(label_smoothing, chunk):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11, bias=False)
    hidden, targets = torch.randn(10, 8, requires_grad=True), torch.randint(11, (10,))
    losses = token_cross_entropy(hidden, head, targets, label_smoothing, chunk)
    losses.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    logprobs = torch.log_softmax(exact @ head.weight.detach().double().T, -1)
    expected = torch.stack(
        [
            -(1 - label_smoothing) * logprobs[i, t] - label_smoothing * sum(logprobs[i, v] for v in range(11)) / 11
            for i, t in enumerate(targets)
        ]
    )
    expected.sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
