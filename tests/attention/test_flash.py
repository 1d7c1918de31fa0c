"""flash-attention counts as installed only if its kernel can be imported, in training and in the doctor's line alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybrid_rl import doctor
from hybrid_rl.attention import flash

OTHER = {
    "cute/__init__.py": "def flash_attn_varlen_func(): ..."
}  # flash-attn-4, which comes with SGLang: no __init__.py at its top
UNFIT = {"__init__.py": "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10\\nmore')"}
WRONG_DEVICE = {"__init__.py": "raise RuntimeError('no CUDA driver')"}
RIGHT = {"__init__.py": "def flash_attn_varlen_func(*args): return args"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def put(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "flash_attn" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            monkeypatch.delitem(sys.modules, name)
        varlen, problem = flash.load()
        monkeypatch.setattr(flash, "varlen", varlen)
        monkeypatch.setattr(flash, "problem", problem)

    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            OTHER,
            "the package flash_attn that is installed has no such kernel: cannot import name 'flash_attn_varlen_func'",
        ),
        (
            UNFIT,
            "the package flash_attn that is installed has no such kernel: flash_attn_2_cuda.so: undefined symbol: _ZN3c10",
        ),
        (WRONG_DEVICE, "the package flash_attn that is installed has no such kernel: no CUDA driver"),
    ],
    ids=["flash-attn-4", "another torch", "no driver"],
)
def test_a_package_of_that_name_without_the_kernel_is_none(installed, files: dict[str, str], said: str) -> None:
    installed(files)
    check = doctor._flash()
    assert flash.varlen is None
    assert not check.ok
    assert check.found.startswith(said)
    assert "\n" not in check.found


def test_the_kernel_is_taken_where_it_can_be_imported(installed) -> None:
    installed(RIGHT)
    assert flash.varlen is not None
    assert flash.varlen(1, 2) == (1, 2)
    assert doctor._flash().ok
