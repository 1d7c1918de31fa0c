"""The site that `make docs` builds: the page of settings has every key, and a broken link or an unlisted page fails."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from hybrid_rl.config import Config, DataConfig
from hybrid_rl.preflight.names import OPEN, keys

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Key → the cells of its row."""
    lines = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["settings_page"]()
    cells = [line.replace("\\|", "¦").strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_page_of_settings_has_each_key_with_its_meaning(rows):
    known = OmegaConf.structured(Config)
    every = set(keys(known))
    plain = {key for key in every if not any(other.startswith(f"{key}.") for other in every) or key in OPEN}
    own = {f"data.{field.name}" for field in fields(DataConfig)}
    assert {key for key in plain if not key.startswith(tuple(f"{name}." for name in OPEN))} | own == set(rows)
    assert [key for key, cells in rows.items() if len(cells) != 4 or not cells[-1]] == []
    assert rows["rollout.group_size"] == ["integer", "`16`", "≥ 1", "rollouts per task"]
    assert rows["sft.optimizer.lr"][1] == "`2e-05`", "the default of the section, not of the class"
    assert rows["policy.layout"][0] == "auto ¦ padded ¦ packed ¦ trees"
    assert "`trees`: the prompt of a group once" in rows["policy.layout"][3]
    assert rows["engine.tensor_parallel"][3].endswith("each with a part of the weights")


def test_the_page_of_settings_has_each_key_that_conf_sets(rows):
    def inside(section: dict, prefix: str) -> Iterator[str]:
        for name, value in section.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in OPEN and key not in rows:
                yield from inside(value, f"{key}.")
            elif not key.startswith(("hydra.", "defaults")):
                yield key

    for file in (ROOT / "conf").rglob("*.yaml"):
        text, group = file.read_text(), file.parent.relative_to(ROOT / "conf")
        prefix = "" if "@package _global_" in text or file.name == "config.yaml" else f"{str(group).replace('/', '.')}."
        for key in inside(yaml.safe_load(text) or {}, prefix):
            assert key in rows or key.startswith(OPEN) or key.endswith(".defaults"), f"{file}: {key}"


def test_a_broken_link_and_a_page_without_a_place_end_the_build(tmp_path):
    for name in ("recipes", "benchmarks", "conf", "hybrid_rl", *(file.name for file in ROOT.glob("*.md"))):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "unlisted.md").write_text(
        "[a](nowhere.md) [b](runs.md#nowhere) [c](../hybrid_rl/nowhere.py)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "  - docs/unlisted.md\n" in done.stderr, "not in the navigation"
    problems = [line for line in done.stderr.splitlines() if line.startswith("WARNING") and "docs/unlisted.md" in line]
    assert [what in line for what, line in zip(("nowhere.md", "nowhere.py", "#nowhere"), problems, strict=True)]
