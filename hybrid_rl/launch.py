"""Start a run's ranks on this machine, and make sure that none outlives the others or its launcher. No torch before it is needed.

The ranks find each other through environment variables, those of torchrun: who started them makes no difference to them.
Every socket of ranks that are started here listens on the loopback interface only.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

LAUNCHER = "HYBRID_RL_LAUNCHER"  # process id of the one that started this rank
WARNINGS = "ignore:resource_tracker:UserWarning"  # multiprocessing's, of what a rank that was ended by a signal left to be cleaned up
SPEAK = 2.0  # seconds that a rank leaves to rank 0 to say what all of them would say


def world() -> int | None:
    """How many ranks torchrun, accelerate or another launcher started, this process one of them; None without a launcher."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size else None


def launched() -> bool:
    """Whether this process is one rank of several."""
    return (world() or 1) > 1


def after_rank_0() -> None:
    """Before a message that rank 0 has too: it says it and ends, so the launcher ends the others while they wait here."""
    if launched() and os.environ["RANK"] != "0":
        time.sleep(SPEAK)


def end_with_launcher() -> None:
    """End this rank and its child processes within a second or two of its launcher's death, however that died."""
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_watch, args=(launcher,), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "resource_tracker" not in " ".join(child.cmdline()):  # that one cleans up once this process is gone
                child.kill()
    os._exit(1)


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run python with `arguments` as `count` ranks; returns the exit code: that of the first that fails, 128 + n after signal n.

    The first rank to fail ends the others.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    logging.disable(logging.CRITICAL)  # torch's launcher comments on every signal; the ranks speak for themselves
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", LAUNCHER: str(os.getpid()),
        }  # fmt: skip
        warnings = os.environ.get("PYTHONWARNINGS", "")
        shared["PYTHONWARNINGS"] = f"{warnings},{WARNINGS}".strip(",")
        if sys.platform == "linux":
            shared |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        ranks = None
        try:
            ranks = start_processes(
                "rank",
                sys.executable,
                dict.fromkeys(range(count), tuple(arguments)),
                {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)},
                DefaultLogsSpecs(folder),
            )
            result = ranks.wait(period=0.1)
        except SignalException as error:
            with suppress(SignalException):  # a second signal ends the patience
                if ranks:
                    ranks.close(error.sigval, timeout=10)
            return 128 + error.sigval
        except KeyboardInterrupt:
            return 130
        finally:
            _end_children(list(ranks.pids().values()) if ranks else [])
            del store  # it lives as long as the ranks
    if not result or not result.failures:
        return 0
    rank, failure = next(iter(result.failures.items()))  # in the order they were noticed; the later ones were ended for this one
    if failure.exitcode > 0:
        return failure.exitcode
    hint = "; did the machine run out of memory?" if failure.exitcode == -signal.SIGKILL else ""
    print(f"hybrid_rl: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}{hint}", file=sys.stderr)
    return 1


def _end_children(ranks: Sequence[int], grace: float = 2.0) -> None:
    """What ranks that died by a signal left of their process groups ends by itself, unless it hangs."""
    deadline = time.monotonic() + grace
    for rank in ranks:
        with suppress(ProcessLookupError, PermissionError):  # nothing left
            while time.monotonic() < deadline:
                os.killpg(rank, 0)
                time.sleep(0.05)
            os.killpg(rank, signal.SIGKILL)
