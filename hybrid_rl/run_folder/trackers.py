"""Send what metrics.jsonl gets to an experiment tracker too: TensorBoard, W&B, MLflow or trackio, through Accelerate.

A thread of its own talks to the tracker, so that no step waits for a network, and a tracker that fails never ends a
run. tracker.json in the run's folder names the tracker's run and says what it has, so that a resumed run goes on in it
and sends nothing twice. Only rank 0 tracks. This module imports neither accelerate nor torch before a tracker is opened.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml
from omegaconf import OmegaConf

from hybrid_rl.config import Config, TrackerKind
from hybrid_rl.run_folder.files import Unreadable, plain, read_json, write_json

FILE = "tracker.json"
START = 120.0  # seconds within which a tracker must have begun
CLOSE = 60.0  # seconds within which it must have taken what is left, when the run ends
# they take one ascending step for everything: the number of the record
COUNTED = (TrackerKind.wandb, TrackerKind.trackio)


def missing(kind: TrackerKind) -> str:
    """Return which package the tracker lacks and how to install it, "" if it can be used."""
    if kind == TrackerKind.none or importlib.util.find_spec(kind.value):
        return ""
    return f"{kind.value} is not installed; pip install -e '.[trackers]'"


def open_tracker(
    config: Config, folder: Path, facts: Mapping[str, Any], resumed: bool, say: Callable[[str], None]
) -> Tracker | None:
    """Begin to track a run, or go on with what its folder says; None without a tracker, or if it fails, with a note.

    `facts` (git state, versions, …) are stored beside the settings.
    """
    if config.tracker.kind == TrackerKind.none:
        return None
    tracker = Tracker(config, folder, facts, resumed, say)
    return tracker if tracker.begun else None


class Tracker:
    """A tracker's run, and the thread that talks to it."""

    def __init__(
        self, config: Config, folder: Path, facts: Mapping[str, Any], resumed: bool, say: Callable[[str], None]
    ):
        self.kind, self._folder, self._say = config.tracker.kind, folder, say
        self._saved = self._read() if resumed else {}
        self._failed, self._closed = False, False
        self._had: dict[str, int] = dict(self._saved.get("sent", {}))
        self._left: SimpleQueue[tuple[dict[str, float], int, str] | bool] = SimpleQueue()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(config, facts, started), daemon=True, name="tracker")
        self._thread.start()
        try:
            started.result(START)
            self.begun = True
        except Exception as error:
            self.begun = False
            self._report("did not begin", error)

    def log(self, stage: str, values: Mapping[str, Any]) -> None:
        """Hand over one line of metrics.jsonl, unless the tracker's run had it before a resume; returns at once."""
        kind = f"{stage}_{values['name']}" if "name" in values else stage
        if values["step"] > self._had.get(kind, -1):
            self._left.put((numbers(stage, values), values["step"], kind))

    def close(self, finished: bool) -> None:
        """Wait until the tracker has what is left, at most CLOSE seconds, and mark its run finished or failed."""
        if self._closed:
            return
        self._closed = True
        self._left.put(finished)
        self._thread.join(CLOSE)
        if self._thread.is_alive():
            self._report("is closed", TimeoutError(f"it did not take everything within {CLOSE:g} s"))

    def _read(self) -> dict[str, Any]:
        try:
            saved = read_json(self._folder / FILE)
        except Unreadable:
            return {}
        usable = isinstance(saved.get("sent"), dict) and isinstance(saved.get("count"), int)
        return saved if saved.get("kind") == self.kind.value and usable else {}

    def _work(self, config: Config, facts: Mapping[str, Any], started: Future[None]) -> None:
        """Everything that touches the library, in one thread: MLflow's active run belongs to a thread."""
        try:
            stored = {**settings(config), **_flat(facts)}
            library, name = _make(config, self._folder, self._saved.get("id"), stored)
            library.main_process_only = False
            library.start()
            if self.kind == TrackerKind.wandb:  # its axes: steps of each stage, not lines
                for stage in ("sft", "rl", "eval"):
                    library.tracker.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            name = name or library.tracker.info.run_id
            if not self._saved:
                library.store_init_configuration(stored)
            self._saved = {"kind": self.kind.value, "id": name, "count": 0, "sent": {}, **self._saved}
            write_json(self._folder / FILE, self._saved)
        except BaseException as error:  # some libraries exit
            started.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
            return
        started.set_result(None)
        while not isinstance(record := self._left.get(), bool):
            values, step, kind = record
            try:
                library.log(values, step=self._saved["count"] + 1 if self.kind in COUNTED else step)
                self._saved["count"] += 1
                self._saved["sent"][kind] = step  # the last step of each stage and evaluation
                write_json(self._folder / FILE, self._saved)
            except Exception as error:
                self._report("did not take a step", error)
        try:
            _finish(self.kind, library, record)
        except Exception as error:
            self._report("is closed", error)

    def _report(self, what: str, error: Exception) -> None:
        """Say that the tracker failed, once a run."""
        if not self._failed:
            self._failed = True
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._say(
                f"note:    tracker={self.kind.value} {what}: {reason}; the run goes on, metrics.jsonl has everything"
            )


def settings(config: Config) -> dict[str, Any]:
    """Return all settings by their dotted keys, as texts, numbers, booleans or None."""
    return _flat(yaml.safe_load(OmegaConf.to_yaml(OmegaConf.structured(config))))


def numbers(stage: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of metrics.jsonl by name, like rl/seconds/update and eval_base/reward."""
    name = values.get("name")
    prefix = f"{stage}_{name}" if stage == "eval" and name not in ("step", "rl") else stage
    flat = _flat(plain(dict(values)), "/", f"{prefix}/")
    return {
        re.sub(r"[^\w\-. /:]", "_", key): value for key, value in flat.items() if isinstance(value, int | float)
    }  # the names that MLflow allows


def _flat(node: object, between: str = ".", prefix: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping):
        return {
            k: v for key, child in node.items() for k, v in _flat(child, between, f"{prefix}{key}{between}").items()
        }
    return {prefix[: -len(between)]: str(node) if isinstance(node, list) else node}


def _make(config: Config, folder: Path, known: str | None, stored: dict[str, Any]) -> tuple[Any, str | None]:
    """Return Accelerate's tracker, not yet started, and the name of its run; MLflow gives its own.

    trackio takes what is `stored` with the run here, and forgets it if a resumed run does not repeat it.
    """
    with _one_process():
        from accelerate import tracking
        from accelerate.state import PartialState

        PartialState(cpu=True)  # its log wants one
    t = config.tracker
    title, arguments = t.name or f"{config.name}/{folder.name}", dict(t.arguments)
    if t.kind == TrackerKind.tensorboard:
        return tracking.TensorBoardTracker("tensorboard", folder, **arguments), title
    if t.kind == TrackerKind.wandb:
        name = known or uuid.uuid4().hex[:8]
        begin: dict[str, Any] = {"name": title, "id": name, "resume": "allow", "tags": list(t.tags), "dir": str(folder)}
        begin["settings"] = {"quiet": True}
        mode = {"mode": "offline"} if t.offline else {}
        return tracking.WandBTracker(t.project, **{**begin, **mode, **arguments}), name
    if t.kind == TrackerKind.trackio:
        name = known or title
        return tracking.TrackioTracker(
            t.project, **{"name": name, "resume": "allow", "config": stored, **arguments}
        ), name
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    if t.offline or not os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow.set_tracking_uri(f"sqlite:///{Path(config.output_dir).absolute() / 'mlflow.db'}")
    tags = {"tags": ", ".join(t.tags)} if t.tags else None
    return tracking.MLflowTracker(t.project, **{"run_name": title, "run_id": known, "tags": tags, **arguments}), known


@contextmanager
def _one_process() -> Iterator[None]:
    """Hide the launcher's variables: Accelerate would make a process group of its own, and set torch's threads."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ |= hidden


def _finish(kind: TrackerKind, library: Any, finished: bool) -> None:
    """End the tracker's run; Accelerate's own interface knows no failed ones."""
    if finished or kind in (TrackerKind.tensorboard, TrackerKind.trackio):
        library.finish()
    elif kind == TrackerKind.wandb:
        library.tracker.finish(exit_code=1)
    else:
        import mlflow

        mlflow.end_run("KILLED")
