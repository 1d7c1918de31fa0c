"""Start a run's ranks on this machine, and make sure that none outlives the others or its launcher. No torch before it is needed.

The ranks find each other through environment variables, those of torchrun: who started them makes no difference to them.
Every socket of ranks that are started here listens on the loopback interface only.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hybrid_rl.processes import hangs
from hybrid_rl.processes.signals import SIGNALS, asked, end_now, kill_children, listening

LAUNCHER = "HYBRID_RL_LAUNCHER"  # process id of the one that started this rank
WARNINGS = "ignore:resource_tracker:UserWarning"  # multiprocessing's, of what a rank that was ended by a signal left to be cleaned up
AT_A_SIGNAL = tuple(128 + number for number in SIGNALS)  # exit codes
MARGIN = 10.0  # seconds beyond a limit of the ranks' own, after which the launcher does not rely on it any more
TOGETHER = 10.0  # seconds within which ranks end that agreed to
SPEAK = 2.0  # seconds that a rank leaves to rank 0 to say what all of them would say


def world() -> int | None:
    """How many ranks torchrun, accelerate or another launcher started, this process one of them; None without a launcher."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size else None


def environment_problem() -> str:
    """What is wrong with the variables that a launcher sets for its ranks; "" where nothing is. No rank must wait for others in vain."""
    e = os.environ
    if not e.get("WORLD_SIZE"):
        return "RANK is set and WORLD_SIZE is not: start ranks with torchrun, or unset RANK" if e.get("RANK") else ""
    number = {name: int(e[name]) for name in (*NUMBERS, "MASTER_PORT") if e.get(name, "").isdecimal()}
    wanted = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT") if number.get("WORLD_SIZE", 2) > 1 else NUMBERS[:1]
    for name in wanted:
        if not e.get(name):
            return (
                f"WORLD_SIZE={e['WORLD_SIZE']} is set and {name} is not: start ranks with torchrun, or unset WORLD_SIZE"
            )
        if name != "MASTER_ADDR" and name not in number:
            return f"{name}={e[name]}: must be a whole number of at least 0"
    for name, (low, limit) in {
        "WORLD_SIZE": (1, None),
        "RANK": (0, "WORLD_SIZE"),
        "LOCAL_RANK": (0, "LOCAL_WORLD_SIZE"),
    }.items():
        if name in wanted and (number[name] < low or (limit and number[name] >= number[limit])):
            return f"{name}={number[name]}: must be at least {low}" + (
                f" and below {limit}={number[limit]}" if limit else ""
            )
    return ""


NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


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
    end_now(1)


def launch(count: int, arguments: Sequence[str], run_folder: Path, timeout: float, patience: float = 60.0) -> int:
    """Run python with `arguments` as `count` ranks; returns the exit code: that of the first that fails, 128 + n where signal n ended the run.

    The first rank to fail ends the others, and so does one without any progress for `timeout` seconds; stacks are written to
    run_folder/stacks then. SIGTERM and Ctrl-C are passed on to the ranks, which have `patience` seconds to end.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    shared = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", LAUNCHER: str(os.getpid()),
        "PYTHONWARNINGS": f"{os.environ.get('PYTHONWARNINGS', '')},{WARNINGS}".strip(","),
    }  # fmt: skip
    if sys.platform == "linux":
        shared |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with tempfile.TemporaryDirectory() as notes:
        watched = hangs.Watch(Path(notes), timeout, run_folder / "stacks")
        environments = [
            {**shared, hangs.NOTES: notes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)
        ]
        code = attend(environments, arguments, patience, watched)
    del store  # it lives as long as the ranks
    return code


def attend(
    environments: Sequence[dict[str, str]],
    arguments: Sequence[str],
    patience: float,
    watched: hangs.Watch | None = None,
) -> int:
    """Run python with `arguments` once for each of `environments`, together, until all have ended or one has failed. As `launch` says."""
    processes: list[subprocess.Popen[bytes]] = []
    with listening(patience + MARGIN, speaks=False):
        try:
            for (
                environment
            ) in environments:  # in sessions of their own: a terminal's signals reach them through this process only
                processes.append(
                    subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, start_new_session=True)
                )
            failed = _wait(processes, watched)
        except hangs.Hangs as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            _end(processes)
        codes = [process.returncode for process in processes]
        if failed is None:
            return 0
        if codes[failed] >= 0:
            return codes[failed]
        if asked():
            return 128 + asked()
    hint = "; did the machine run out of memory?" if codes[failed] == -signal.SIGKILL else ""
    print(f"hybrid_rl: rank {failed} was ended by {signal.Signals(-codes[failed]).name}{hint}", file=sys.stderr)
    return 1


def _wait(processes: Sequence[subprocess.Popen[bytes]], watched: hangs.Watch | None) -> int | None:
    """Until all have ended; the first that failed, or None. Those that end because a signal asked them to do so end together.

    Raises Hangs where one of those that are watched does.
    """
    told, since, pids = False, 0.0, {i: process.pid for i, process in enumerate(processes)}
    while True:
        ended = {i: code for i, process in enumerate(processes) if (code := process.poll()) is not None}
        bad = {i: code for i, code in ended.items() if code not in (0, *AT_A_SIGNAL)}
        if bad:
            return next(iter(bad))
        stopped = next((i for i, code in ended.items() if code), None)
        if stopped is not None:
            since = since or time.monotonic()
        if len(ended) == len(processes) or (since and time.monotonic() - since > TOGETHER):
            return stopped
        if asked() and not told:
            told = True
            for i, process in enumerate(processes):
                if i not in ended:
                    process.send_signal(asked())
        if watched:
            watched.look({rank: pid for rank, pid in pids.items() if rank not in ended}, sorted(ended))
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float = 2.0) -> None:
    """No process is left after this. What a rank that died by a signal left of its group ends by itself, unless it hangs."""
    for process in processes:
        if process.poll() is None:
            kill_children(process.pid)
            process.kill()
            process.wait(MARGIN)
    deadline = time.monotonic() + grace
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # nothing left
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
