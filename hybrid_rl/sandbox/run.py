"""Run Python that nobody has read: what a model wrote, for the rewards that must execute it.

`run` gives a program its inputs and returns what it said, as data: text, or values decoded from JSON. Expected answers never
enter the sandbox; whoever calls compares outside, so a program that forges a verdict has only written something.

Each input is run in a process of its own, in new Linux namespaces (user or, for root, a user id of its own; mount, PID, network, IPC, UTS,
cgroup): no network, no environment, no process but its own and no /proc, a root that shows the standard library read-only, an empty /tmp in memory as
home and working directory, no capability, no new privileges, a filter on system calls, and limits on everything that can be used up. With
PID 1 everything ends that the program started. Where a part of this cannot be had, SandboxError says which: nothing runs with less.

What it does not defend against: holes in the kernel itself, timing and cache side channels, and a machine slowed down within the limits.
"""

from __future__ import annotations

import json
import marshal
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from hybrid_rl.sandbox import inside
from hybrid_rl.sandbox.inside import ENDS, FRAME, MACHINES

End = Literal["exit", "wall", "cpu", "memory", "output", "died", "not run"]
GRACE = 10.0  # seconds beyond the time for all inputs: starting Python, on a busy machine

# -s -P and this environment are python -I, except that the order of a set of strings is the same every time.
FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "PATH": "/nonexistent",
}
ENVIRONMENT["MALLOC_ARENA_MAX"] = "1"  # glibc reserves 64 MiB of address space for each thread's own
BOOT = "import marshal, os; exec(marshal.loads(os.read(0, {}))); launch(marshal.loads(os.read(0, {})))"  # and no byte of an input
INSIDE = marshal.dumps(inside.__loader__.get_code(inside.__name__))  # type: ignore[union-attr]  # compiled once


class SandboxError(RuntimeError):
    """Nothing was run, because no sandbox can be had here; says what is missing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one input may use, all of the program's processes together; `total_seconds` is for all inputs."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 4.0
    total_seconds: float = 8.0
    memory_mib: int = 256  # beyond the interpreter's own
    disk_mib: int = 16  # all files together
    processes: int = 16  # and threads
    output_bytes: int = 1 << 18  # each of standard output, standard error and a function's result

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program did with one input. Everything but `end` is the program's own word.

    `end`: "exit" (by itself, with `code`, or by signal -`code`), the limit it broke, "died" (ended by the system, so out of memory),
    "not run" (the total time was used up). `result` is the function's, `returned` False where it gave none that is JSON.
    """

    end: End
    code: int
    stdout: str
    stderr: str
    returned: bool = False
    result: Any = None

    @property
    def ok(self) -> bool:
        return self.end == "exit" and self.code == 0


def run(
    code: str, inputs: Sequence[str] | Sequence[Sequence[Any]], limits: Limits, function: str | None = None
) -> list[Outcome]:
    """One outcome for each input, in order: `code` as a program with the input as standard input, or its `function` called with *input.

    Inputs of a function, and what it returns, are JSON values (a tuple comes back as a list, NaN does not come back).
    Raises SandboxError where this machine has no sandbox, ValueError or TypeError for a function's input that is no JSON value.
    """
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        raise SandboxError(
            f"the sandbox needs Linux on {' or '.join(MACHINES)}, not {sys.platform} on {os.uname().machine}"
        )
    data = [
        marshal.dumps(json.loads(json.dumps(list(i), allow_nan=False))) if function else str(i).encode() for i in inputs
    ]
    request = {
        "code": code, "function": function, "sizes": [len(d) for d in data], "parent": os.getpid(),
        "cpu": limits.cpu_seconds, "wall": limits.wall_seconds, "total": limits.total_seconds,
        "memory": limits.memory_mib << 20, "disk": limits.disk_mib << 20,
        "processes": limits.processes, "output": limits.output_bytes,
    }  # fmt: skip
    try:
        frames = _launch(marshal.dumps(request), data, limits.total_seconds + GRACE)
    except OSError as error:
        raise SandboxError(_refusal(str(error))) from error
    outcomes = []
    for _ in inputs:
        if len(frames) < FRAME.size:
            raise SandboxError("the sandbox's launcher ended early: this machine is out of memory or processes")
        end, exit_code, *sizes = FRAME.unpack_from(frames)
        parts, start = [], FRAME.size
        for size in sizes:
            parts.append(frames[start : start + size])
            start += size
        frames = frames[start:]
        stdout, stderr = (part.decode("utf-8", "replace") for part in parts[:2])
        if ENDS[end] == "setup":
            raise SandboxError(_refusal(stderr))
        returned, result = _decode(parts[2]) if function else (False, None)
        outcomes.append(Outcome(ENDS[end], exit_code, stdout, stderr, returned, result))  # type: ignore[arg-type]
    return outcomes


def check() -> str | None:
    """None where code can be run in the sandbox (it was tried), otherwise what is missing."""
    try:
        outcome = run("print(input())", ["ready"], Limits())[0]
    except SandboxError as error:
        return str(error)
    return None if outcome.ok and outcome.stdout == "ready\n" else f"a first program failed in the sandbox: {outcome}"


def _launch(request: bytes, data: list[bytes], timeout: float) -> bytes:
    """What the launcher wrote. Request and answer are files in memory: no pipe can fill up, nothing is read while it runs."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    command = [python, *FLAGS, "-c", BOOT.format(len(INSIDE), len(request)), f"hybrid_rl-sandbox-of-{os.getpid()}"]
    with open(os.memfd_create("request"), "w+b") as asked, open(os.memfd_create("answer"), "w+b") as answer:
        asked.writelines((INSIDE, request, *data))
        asked.seek(0)
        process = subprocess.Popen(
            command,
            stdin=asked,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        try:
            with open(os.pidfd_open(process.pid)) as ended:
                waiting = select.poll()
                waiting.register(ended, select.POLLIN)
                waiting.poll(timeout * 1000)
        finally:
            process.kill()  # the whole tree ends with it; nothing happens where it has already ended
            process.wait()
        answer.seek(0)
        return answer.read()


def _decode(text: bytes) -> tuple[bool, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return True, json.loads(text.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of too many digits, nested too deep
        return False, None


def _refusal(message: str) -> str:
    return f"no sandbox for code: {message}. {_remedy(message)}"


def _remedy(message: str) -> str:
    """What to change so that the step that failed succeeds."""
    if (
        "Resource temporarily unavailable" in message
        or "Cannot allocate memory" in message
        or "Too many open files" in message
    ):
        return "This machine, or this user's share of it, is out of memory, processes or files."
    if "Python installation" in message:
        return "Install it elsewhere, or start as its owner."
    if (
        "Operation not permitted" not in message
        and "Permission denied" not in message
        and "No space left" not in message
    ):
        return "It needs Linux 5.14 or newer."
    for name, wrong, right in (
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("user/max_user_namespaces", "0", "10000"),
    ):
        path = Path("/proc/sys", name)
        if path.exists() and path.read_text().strip() == wrong:
            return f"Allow user namespaces: sysctl {name.replace('/', '.')}={right}."
    return (
        "A container forbids it: start it with --cap-add SYS_ADMIN --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined."
    )
