"""The page about one's own task is followed to the letter, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "own_task.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_page_about_ones_own_task(tmp_path: Path) -> None:
    script, data = blocks("python")
    (recipe,) = blocks("yaml")
    (tmp_path / "sums.py").write_text(script)
    (tmp_path / "make_data.py").write_text(data)
    (tmp_path / "my_conf" / "recipe").mkdir(parents=True)
    (tmp_path / "my_conf" / "recipe" / "mine.yaml").write_text(recipe)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def follow(command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def rewards(output: str) -> list[float]:
        return [float(number) for number in re.findall(r"reward (\d\.\d+) on 100 held-out tasks", output)]

    base, sft, rl = rewards(output := follow("python sums.py"))
    assert base < 0.05 < sft < rl
    folder = tmp_path / output.splitlines()[-1]
    assert (folder / "final" / "model.safetensors").is_file()
    follow("python make_data.py")
    check, *commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert "100 held out" in follow(check)
    first, samples, resumed, evaluated = map(follow, commands)
    assert rewards(first) == [base, sft, rl], "the same task, from files"
    assert "# Samples of `mine" in samples
    assert "step 40/40" in resumed
    assert rewards(evaluated) == rewards(resumed)[-1:]
