"""What every bad input is put to: the run itself, which must end with exit code 1 and in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybrid_rl import stages
from hybrid_rl.config import ConfigError
from hybrid_rl.preflight.settings import load

SMALL = [
    "+recipe=reverse", "sft.steps=0", "rl.steps=1", "rollout.batch_size=4", "rollout.group_size=2", "rollout.max_tokens=8", "algo.minibatches=1",
    "eval.max_tasks=2", "rl.max_empty_steps=0", "model.tiny.hidden_size=32", "model.tiny.intermediate_size=64", "device=cpu",
]  # fmt: skip


class NoScorer:
    """The reward's processes, which no bad input of these kinds waits for."""

    def __init__(self, *_: object, **__: object):
        pass

    def check(self, tasks: object) -> list[str]:
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def last_line(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """last_line(*overrides, **sections) runs a small run in the test's folder, which is the working directory, and returns what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "Scorer", NoScorer)

    def last_line(*overrides: str, folder: str = "run", **sections: dict) -> str:
        try:
            config = OmegaConf.to_object(load([*SMALL, *overrides]))
        except ConfigError as error:  # what the command says with exit code 2
            return str(error)
        for name, section in sections.items():
            setattr(config, name, section)
        capsys.readouterr()
        code = stages.run(config, Path(folder))
        said = capsys.readouterr().out
        assert code == 1, said
        assert said.count("\n") == 1, said
        assert said.startswith("hybrid_rl: ")
        assert "Traceback" not in said
        return said.removeprefix("hybrid_rl: ").removesuffix("\n")

    return last_line
