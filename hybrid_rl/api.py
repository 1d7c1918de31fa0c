"""Train from Python, in a script or a notebook, and read what a run left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hybrid_rl.config import Config
from hybrid_rl.report.read import read_run

if TYPE_CHECKING:
    import pandas as pd


class RunError(RuntimeError):
    """A run did not reach its end; what it printed last says why. `code` is its exit code, `folder` its folder."""

    def __init__(self, code: int, folder: Path):
        super().__init__(f"the run in {folder} ended with exit code {code}; the last line that it printed says why")
        self.code, self.folder = code, folder


@dataclass(frozen=True)
class Run:
    """A run by its folder, finished or not. Every access reads the files as they are now."""

    folder: Path

    def __post_init__(self) -> None:
        """Raise NotADirectoryError if there is no such folder."""
        object.__setattr__(self, "folder", Path(self.folder))
        if not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is not the folder of a run")

    @property
    def config(self) -> dict[str, Any]:
        """Return all settings of the run, as config.yaml has them."""
        return read_run(self.folder).config

    @property
    def summary(self) -> dict[str, Any]:
        """Return what summary.json has of a finished run: evaluations, seconds, versions, …; {} before."""
        return read_run(self.folder).summary

    def records(self, stage: str = "rl") -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl of a stage: "rl", "sft" or "eval"."""
        return {"rl": (run := read_run(self.folder)).rl, "sft": run.sft, "eval": run.evals}[stage]

    def metrics(self, stage: str = "rl") -> pd.DataFrame:
        """Return the records of a stage as a table; inner mappings become columns like seconds/update. Needs pandas."""
        return cast("pd.DataFrame", _pandas().json_normalize(self.records(stage), sep="/"))

    def rollouts(self, of: int | str) -> pd.DataFrame:
        """Return the rollouts of an RL step, by its number, or of an evaluation, like "eval_rl". Needs pandas.

        docs/runs.md describes the columns. Raises FileNotFoundError if there is no such file, or none any more
        (rollout.keep_steps).
        """
        name = f"step_{of:04d}" if isinstance(of, int) else of
        return cast("pd.DataFrame", _pandas().read_parquet(self.folder / "rollouts" / f"{name}.parquet"))


def train(recipe: str | None = None, overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> Run:
    """Train as `python -m hybrid_rl.run +recipe=RECIPE OVERRIDES…` does, in this process, and return the run.

    May be called any number of times. Without a recipe an override must be resume=<folder>. Raises ConfigError for a
    bad setting, before anything loads, and RunError if the run does not reach its end. A sweep needs the command.
    """
    from hybrid_rl.preflight.names import split
    from hybrid_rl.preflight.settings import hydra_folders, load, run_dir
    from hybrid_rl.run import choose_folder, main

    own = Path(config_dir) if config_dir else None
    given = [*([f"+recipe={recipe}"] if recipe else []), *overrides]
    config = cast(Config, _object(load(given, own)))
    task, of_hydra = split(given)
    folder = choose_folder(config, hydra_folders(of_hydra, own)[0]).absolute()
    arguments = [*([f"--config-dir={own}"] if own else []), *task]
    code = main(arguments if config.dry_run else [*arguments, run_dir(folder)])
    if code:
        raise RunError(code, folder)
    return Run(folder)


def _object(config: Any) -> object:
    from omegaconf import OmegaConf

    return OmegaConf.to_object(config)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables need pandas: pip install pandas; Run.records() does without") from error
    return pandas
