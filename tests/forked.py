"""Start a command as a user does, but in a process forked from one that has imported everything once: it begins seconds earlier."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil
import torch

context = multiprocessing.get_context("forkserver")  # a test process has one server, whoever asks first
context.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "transformers", "peft", "tests.ranks", "hybrid_rl.run", "hybrid_rl.stages"]
)


class Forked:
    """`python -m MODULE ARGUMENTS…` in `folder`, with what subprocess.Popen(text=True) offers of it; stderr goes to stdout.

    Forked processes share one seed of Python's hash.
    """

    def __init__(self, module: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(module, list(arguments), folder, dict(environment), theirs))
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), "r")
        ours.close()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return the rest of its output; kill it and its children if that does not end within `timeout` seconds."""
        timer = threading.Timer(timeout, self._kill_all)
        timer.start()
        with self.stdout:
            output = self.stdout.read()
        self._process.join()
        timer.cancel()
        return output, None

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _kill_all(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(self.pid).children(recursive=True), self]:
                process.kill()


def _main(module: str, arguments: list[str], folder: Path, environment: dict[str, str], out: Connection) -> NoReturn:
    os.chdir(folder)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = [module, *arguments]
    torch.set_num_threads(1)
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)
