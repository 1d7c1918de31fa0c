"""Families of models: loaded, sampled, trained and exported rightly, or refused in a line; docs/families.md says which."""

from __future__ import annotations

import pytest

from hybrid_rl.config import Precision
from hybrid_rl.processes.ranks import Ranks
from tests.model_folder import families
from tests.model_folder.families import FAMILIES, PAGE
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow

# One of each kind: fused experts beside a dense layer; biases, the head's too, and dropout; no linear module; refused
FEW = ["qwen3_moe", "phi", "gpt2", "falcon"]


def listed() -> dict[str, str]:
    return {
        line.split("`")[1]: line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    }


def check(family: str, folder) -> None:
    assert families.examine(family, folder).row() == listed()[family], (
        "python -m tests.model_folder.families writes the page again"
    )


@pytest.mark.parametrize("family", FEW)
def test_some_families(family, tmp_path):
    check(family, tmp_path / "model")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FEW])
def test_every_other_family(family, tmp_path):
    check(family, tmp_path / "model")


def test_the_page_lists_every_family():
    assert list(listed()) == list(FAMILIES)


@pytest.mark.parametrize("dtype", [Precision.float32, Precision.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_every_family_that_runs_on_several_ranks_and_in_half_precision(world, dtype, tmp_path):
    if world == 1 and dtype == Precision.float32:
        pytest.skip("test_every_other_family does it")
    folders = [tmp_path / family for family, line in listed().items() if "| yes |" in line]
    for folder in folders:
        families.build(folder.name, folder)
    on_ranks(world, families.load_everywhere, folders, dtype, timeout=300)


def test_a_few_on_two_ranks(tmp_path):
    folders = [tmp_path / family for family in ("qwen3_moe", "gpt2")]
    for folder in folders:
        families.build(folder.name, folder)
    on_ranks(2, families.load_everywhere, folders, Precision.bfloat16)


def test_a_rank_without_a_group_holds_the_same(tmp_path):
    families.build("deepseek_v3", tmp_path / "deepseek_v3")
    families.load_everywhere(Ranks(), [tmp_path / "deepseek_v3"], Precision.float32)
