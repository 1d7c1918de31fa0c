"""Small runs that are cheap enough to be killed by the dozen: each is forked from a server that has imported everything once.

The command's own `main` runs, in a process group of its own; its reward workers, files and messages are those of any run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from safetensors.torch import load_file

from hybrid_rl.run_folder.rollouts import read_rollouts
from tests.faults.moments import Moment, Watch
from tests.forked import context

# all that a checkpoint must hold: a critic, a frozen reference whose coefficient adapts, generators in use, the best evaluation
SMALL = [
    "+recipe=reverse", "device=cpu", "sft.steps=12", "sft.checkpoint_every=5", "rl.steps=5", "rl.checkpoint_every=2", "rl.eval_every=2",
    "rl.keep_best=true", "rl.keep_checkpoints=1", "eval.max_tasks=4", "rollout.batch_size=8", "rollout.group_size=4", "rollout.max_tokens=12",
    "model.tiny.hidden_size=32", "model.tiny.intermediate_size=64", "algo.minibatches=2", "algo.silent_by=none", "algo.reference=frozen",
    "algo.kl.coef=0.01", "algo.kl.target=0.01", "algo/advantage=gae", "algo.advantage._target_=tests.faults.parts.noisy", "rl.optimizer.schedule=cosine",
    "reward._target_=tests.faults.parts.hashed",
]  # fmt: skip
TIMES = {"seconds", "memory", "memory_gib", "memory_reserved_gib", "memory_device_gib", "tokens_per_second"}
LIMIT = 120.0  # seconds for any one process


class Run:
    """One start of the command in `folder`, on `ranks` ranks."""

    def __init__(self, folder: Path, *overrides: str, ranks: int = 1, moment: Moment | None = None, victim: int = 0):
        self.log = folder / f"log_{len(list(folder.glob('log_*')))}"
        self.log.touch()
        launcher = {}
        if ranks > 1:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            launcher = {
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        self.processes: list[Any] = []
        for rank in range(ranks):
            environment = launcher | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if launcher else {})
            leader = self.processes[0].pid if self.processes else 0
            arguments = (
                folder,
                self.log,
                leader,
                environment,
                [*SMALL, *overrides],
                moment if rank == victim else None,
            )
            process = context.Process(target=_run, args=arguments)
            process.start()
            self.processes.append(process)

    def wait(self) -> list[int]:
        """The ranks' exit codes, that of a signal negative; nothing of them is left after this."""
        deadline = time.monotonic() + LIMIT
        try:
            for process in self.processes:
                process.join(max(0.1, deadline - time.monotonic()))
            return [process.exitcode for process in self.processes]
        finally:
            for process in self.processes:  # the first leads the group; another may lead its own
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT
        while text not in self.output and self.processes[0].is_alive():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    @property
    def output(self) -> str:
        return self.log.read_text()


def _run(
    folder: Path, log: Path, leader: int, environment: dict[str, str], arguments: list[str], moment: Moment | None
) -> None:
    _join_group(leader)
    os.chdir(folder)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.argv = ["hybrid_rl.run", *arguments]
    torch.set_num_threads(1)
    from hybrid_rl.processes import ranks
    from hybrid_rl.run import main

    watch = Watch(moment)

    def leave(code: int) -> NoReturn:
        if code == 0 and environment.get("RANK", "0") == "0":
            watch.write(folder / "phases.json")
        sys.stdout.flush()
        os._exit(code)

    ranks._exit = leave  # where one of several ranks ends
    leave(main())


def _join_group(leader: int) -> None:
    """Into the first rank's process group, which exists a moment after that rank; into one of its own where that rank is gone.

    Never in the tests' group: the strike takes the whole group along.
    """
    deadline = time.monotonic() + 10
    while psutil.pid_exists(leader) and time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            return os.setpgid(0, leader)
        time.sleep(0.001)
    os.setpgid(0, 0)


def run(
    folder: Path, *overrides: str, code: int = 0, ranks: int = 1, moment: Moment | None = None, victim: int = 0
) -> str:
    """One start to its end, and what it printed."""
    started = Run(folder, *overrides, ranks=ranks, moment=moment, victim=victim)
    assert started.wait() == [code] * ranks, started.output
    assert code == -9 or "Traceback" not in started.output
    return started.output


def draw(numbers: random.Random, whole: Path) -> Moment:
    """A moment of the run in `whole`: any phase, any of its calls, before or within it."""
    seconds = json.loads((whole / "phases.json").read_text())
    phase = numbers.choice(sorted(seconds))
    call = numbers.randrange(len(seconds[phase]))
    return Moment(phase, call, numbers.choice([0.0, numbers.uniform(0, 1.2) * seconds[phase][call]]))


def folder_of(folder: Path) -> Path:
    """The run's own folder. One without settings was killed before it wrote any, and left alone by the next."""
    found = [settings.parent for settings in folder.glob("outputs/reverse/*/config.yaml")]
    assert len(found) == 1, found
    return found[0]


def finished(folder: Path) -> bool:
    return bool(list(folder.glob("outputs/reverse/*/summary.json")))


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder_of(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def assert_same(a: Path, b: Path) -> None:
    """Every number, prompt, token, reward and weight, to the bit; no line doubled or skipped, no file left over."""
    assert metrics(a) == metrics(b)
    a, b = folder_of(a), folder_of(b)
    # .lock: no lock is held by a process that was killed, and one killed at its very end leaves the file
    files = [{str(f.relative_to(x)) for f in x.rglob("*") if f.is_file() and f.name != ".lock"} for x in (a, b)]
    assert files[0] == files[1]
    for file in files[0]:
        if file.endswith(".parquet"):
            assert read_rollouts(a / file) == read_rollouts(b / file), file
        if file.endswith(".safetensors"):
            one, two = load_file(a / file), load_file(b / file)
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one), file
    best = [json.loads((x / "summary.json").read_text())["best"] for x in (a, b)]
    assert best[0] == best[1]


def copied(whole: Path, folder: Path) -> Path:
    """The whole run's folder, to go on from."""
    shutil.copytree(whole / "outputs", folder / "outputs")
    return folder_of(folder)


def left_of(folder: Path, seconds: float = 15.0) -> list[psutil.Process]:
    """Processes that still work in the folder after some time."""
    until = time.time() + seconds
    while (left := [p for p in psutil.process_iter() if _works_in(p, folder)]) and time.time() < until:
        time.sleep(0.1)
    return left


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
