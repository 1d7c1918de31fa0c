"""Fused kernels: which one is chosen, what it is asked for, and what layouts make of its samples.

No kernel runs without a GPU. A function written from the definition of varlen attention stands in for it here, with the
signature of torch's; on a GPU the kernels themselves are compared with float64 (`make test-gpu`).
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl import doctor
from hybrid_rl.attention import kernels
from hybrid_rl.attention.attend import LayerAttention, Packed
from hybrid_rl.attention.kernels import Kernel, Spans
from hybrid_rl.attention.trees import Trees
from hybrid_rl.engine.kv_cache import Prefill
from hybrid_rl.policy.layout import _idle_row
from hybrid_rl.policy.model import Policy
from tests.attention.samples import assert_same, forest_parts, forests
from tests.device import DEVICE, ON_GPU
from tests.policy.test_layout import assert_same_gradient, mixed, plain, run

CPU = torch.device("cpu")


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of each sample by a dense mask, causal and aligned to the bottom right, as the kernels document it."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    before, after = window_size
    assert after == 0
    repeat = query.shape[1] // key.shape[1]
    results, counts = [], []
    for q0, q1, k0, k1 in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
        q, k, v = query[q0:q1], key[k0:k1].repeat_interleave(repeat, 1), value[k0:k1].repeat_interleave(repeat, 1)
        place = torch.arange(len(q))[:, None] + len(k) - len(q)
        age = place - torch.arange(len(k))
        seen = (age >= 0) & ((age <= before) | (before < 0))
        assert seen.any(1).all()
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, v))
        counts.append((len(q), len(k)))
    assert (max(q for q, _ in counts), max(k for _, k in counts)) == (max_q, max_k)
    assert enable_gqa or repeat == 1
    return torch.cat(results)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Put the definition in the place of torch's kernel, for any device and dtype."""
    patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    kernel = kernels.load_torch()
    assert kernel.function is varlen
    patch.setattr(kernels, "fused", lambda query, value, how: kernel if kernel.fits(query, value, how) else None)


def test_the_stand_in_has_the_keywords_of_the_installed_kernel() -> None:
    from torch.nn.attention.varlen import varlen_attn

    real = list(inspect.signature(varlen_attn).parameters)
    assert real[:7] == list(inspect.signature(varlen).parameters)[:7]
    assert set(inspect.signature(varlen).parameters) <= set(real)


windows = st.builds(LayerAttention, st.just(0.3), st.none() | st.integers(1, 14))


@example(forest=[(0, [3]), (4, [0, 2])], how=LayerAttention(0.3), seed=0)  # no prompt; an empty branch
@given(forest=forests(), how=windows, seed=st.integers(0, 9))
@settings(max_examples=40)
def test_trees_by_a_kernel(forest: list[tuple[int, list[int]]], how: LayerAttention, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        assert_same(Trees(forest), forest_parts(forest), how, seed)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), how=windows, seed=st.integers(0, 9))
@settings(max_examples=40)
def test_packed_rows_by_a_kernel(lengths: list[int], how: LayerAttention, seed: int) -> None:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    parts = [torch.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        assert_same(Packed(lengths), parts, how, seed)
        assert_same(Prefill(lengths), parts, how, seed)


def test_rows_of_a_model_by_a_kernel(folder_of, reference_of) -> None:
    """Grouped heads, windows in some layers, and idle rows, which have one token."""
    for name in ("qwen3", "gemma3"):
        policy, rollouts = Policy.load(folder_of(name), CPU), mixed()
        expected, expected_gradient = plain(reference_of(folder_of(name)).model, rollouts)
        with pytest.MonkeyPatch.context() as patch:
            stand_in(patch)
            for layout, row_tokens in (("packed", 2048), ("trees", 2048), ("trees", 40)):
                logprobs, gradient = run(policy, rollouts, layout, row_tokens)
                torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
                assert_same_gradient(gradient, expected_gradient)
            idle = _idle_row()
            policy.logprobs(idle, 1.0)[0].sum().backward()


# ---- the kernels themselves -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="kernels run on a GPU alone")
@pytest.mark.parametrize("dtype", kernels.HALF)
@pytest.mark.parametrize("kernel", kernels.KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("how", [LayerAttention(0.3), LayerAttention(0.3, 4), LayerAttention(0.3, None, 2.0)])
def test_a_kernel_is_float64_to_rounding(monkeypatch, kernel: Kernel, dtype: torch.dtype, how: LayerAttention) -> None:
    if problem := kernels.fails(kernel, DEVICE, dtype):
        assert kernel.function is None or kernel.name != "torch varlen", problem
        pytest.skip(problem)
    monkeypatch.setattr(kernels, "KERNELS", (kernel,))
    forest = [(6, [7, 7, 1, 0]), (0, [4]), (130, [90, 1]), (1, [])]
    assert kernels.chosen_name(DEVICE, dtype) == kernel.name
    assert_same(Trees(forest), forest_parts(forest), how, 0, dtype)
    assert_same(Packed([20, 1, 150]), [torch.arange(20), torch.arange(20, 21), torch.arange(21, 171)], how, 1, dtype)
    assert_same(Packed([1]), [torch.arange(1)], how, 2, dtype)


@pytest.mark.gpu
def test_a_gpu_has_a_kernel_and_a_cpu_has_none() -> None:
    assert kernels.chosen_name(CPU, torch.float32) == kernels.chosen_name(CPU, torch.bfloat16) == kernels.WITHOUT
    assert kernels.chosen_name(DEVICE, torch.float32) == kernels.WITHOUT
    assert (kernels.choose(DEVICE, torch.bfloat16) is not None) == ON_GPU


# ---- which one is chosen ----------------------------------------------------------------------------------------------

OTHER = {
    "cute/__init__.py": "def flash_attn_varlen_func(): ..."
}  # flash-attn-4, which comes with SGLang: no __init__.py at its top
UNFIT = {"__init__.py": "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10\\nmore')"}
WRONG_DEVICE = {"__init__.py": "raise RuntimeError('no CUDA driver')"}
RIGHT = {"__init__.py": "def flash_attn_varlen_func(*args, **asked): return args, asked"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def put(files: dict[str, str]) -> Kernel:
        for name, text in files.items():
            path = tmp_path / "flash_attn" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            monkeypatch.delitem(sys.modules, name)
        kernel = kernels.load_flash()
        monkeypatch.setattr(kernels, "KERNELS", (kernel,))
        return kernel

    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


NONE = "the package flash_attn that is installed has no such kernel: "


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (OTHER, f"{NONE}cannot import name 'flash_attn_varlen_func'"),
        (UNFIT, f"{NONE}flash_attn_2_cuda.so: undefined symbol: _ZN3c10"),
        (WRONG_DEVICE, f"{NONE}no CUDA driver"),
    ],
    ids=["flash-attn-4", "another torch", "no driver"],
)
def test_a_package_of_that_name_without_the_kernel_is_none(installed, files: dict[str, str], said: str) -> None:
    kernel = installed(files)
    assert kernel.function is None
    assert kernel.problem.startswith(said)
    check = doctor._kernel()
    assert not check.ok
    assert said in check.found
    assert "\n" not in check.found


def test_flash_attention_is_asked_in_its_own_words(installed) -> None:
    kernel = installed(RIGHT)
    assert not kernel.problem
    q, k = torch.ones(5, 4, 8), torch.ones(9, 2, 8)
    args, asked = kernel(q, k, k, Spans([2, 3], [4, 5]), LayerAttention(0.3, 4, 2.0))
    assert [a.tolist() for a in args[3:5]] == [[0, 2, 5], [0, 4, 9]]
    assert args[5:] == (3, 5)
    assert asked == {
        "softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "deterministic": False, "softcap": 2.0,
    }  # fmt: skip
    assert kernel(q, k, k, Spans([2, 3], [4, 5]), LayerAttention(0.3))[1]["window_size"] == (-1, 0)


@pytest.mark.parametrize(
    ("size", "how", "by_torch", "by_flash"),
    [
        (128, LayerAttention(0.1), True, True),
        (128, LayerAttention(0.1, softcap=2.0), False, True),
        (128, LayerAttention(0.1, sinks=torch.zeros(2)), False, False),
        (12, LayerAttention(0.1), False, False),
        (264, LayerAttention(0.1), False, False),
    ],
)
def test_a_layer_that_a_kernel_does_not_compute_is_left_to_others(size, how, by_torch, by_flash) -> None:
    query = torch.zeros(1, 2, 3, size)
    assert [k.fits(query, query, how) for k in (kernels.load_torch(), kernels.load_flash())] == [by_torch, by_flash]


def test_a_kernel_that_fails_on_this_gpu_is_not_chosen(monkeypatch) -> None:
    """A kernel for newer GPUs raises when it is called; the next one is taken, and the reason is one line."""

    def broken(*args: object, **asked: object) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")

    one = Kernel("one", broken, "", lambda how: {}, softcap=False)
    two = Kernel("two", lambda q, k, v, *rest, **asked: q * k.sum() * v.sum(), "", lambda how: {}, softcap=False)
    monkeypatch.setattr(kernels, "KERNELS", (one, two))
    monkeypatch.setattr(kernels, "on_gpu", lambda device: True)
    with torch.inference_mode():
        assert kernels.choose(CPU, torch.bfloat16) is two
    assert kernels.fails(one, CPU, torch.bfloat16) == "FlashAttention only supports Ampere GPUs or newer."
    assert kernels.chosen_name(CPU, torch.float32) == "SDPA"
