"""Run untrusted Python that a model wrote, for the rewards that must execute it.

`run` gives a program its inputs and returns its output as data: text, or values decoded from JSON. Expected answers
never enter the sandbox; the caller compares outside, so a program cannot forge a verdict.

Each input runs in a process of its own, in new Linux namespaces (user or, for root, a user id of its own; mount, PID,
network, IPC, UTS, cgroup): no network, no environment, no other processes and no /proc, a root that shows the standard
library read-only, an empty /tmp in memory as home and working directory, no capability, no new privileges, a filter on
system calls, and limits on every resource. When PID 1 ends, everything ends that the program started. If the machine
lacks a part of this, SandboxError names it, and nothing runs.

It does not defend against holes in the kernel, timing and cache side channels, or a slower machine within the limits.
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
from hybrid_rl.sandbox.inside import ENDS, FRAME
from hybrid_rl.sandbox.seccomp import MACHINES, seccomp_filter

End = Literal["exit", "wall", "cpu", "memory", "output", "died", "not run"]
GRACE = 10.0  # seconds beyond the time for all inputs, to start Python on a busy machine

# -s -P and this environment are python -I, except that the order of a set of strings is the same every time.
FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "PATH": "/nonexistent",
    "MALLOC_ARENA_MAX": "1",  # otherwise glibc reserves 64 MiB of address space for each thread
}
# it reads no byte of an input
BOOT = "import marshal, os; exec(marshal.loads(os.read(0, {}))); launch(marshal.loads(os.read(0, {})))"
INSIDE = marshal.dumps(inside.__loader__.get_code(inside.__name__))  # type: ignore[union-attr]  # compiled once
# the system's words in a failed setup
EXHAUSTED = ("Resource temporarily unavailable", "Cannot allocate memory", "Too many open files")
FORBIDDEN = ("Operation not permitted", "Permission denied", "No space left")


class SandboxError(RuntimeError):
    """Raised when this machine has no sandbox; the message says what is missing. Nothing was run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limit what one input may use, all processes of its program together; `total_seconds` is for all inputs."""

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
    """What a program did with one input. Only `end` can be trusted; the program decides the rest.

    `end` is "exit" (by itself, with `code`, or by signal -`code`), the limit that it exceeded, "died" (ended by the
    system: out of memory), or "not run" (the total time was used up). `result` is the function's; `returned` is False
    if it returned nothing that is JSON.
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
    """Run `code` with each input, and return the outcomes in order.

    Without `function`, `code` is a program that reads its input from standard input; otherwise its `function` is called
    with *input. A function's inputs and result are JSON values (a tuple returns as a list, NaN not at all). Raises
    SandboxError if this machine has no sandbox, ValueError or TypeError if an input of a function is not a JSON value.
    """
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        raise SandboxError(
            f"the sandbox needs Linux on {' or '.join(MACHINES)}, not {sys.platform} on {os.uname().machine}"
        )
    data = [
        marshal.dumps(json.loads(json.dumps(list(i), allow_nan=False))) if function else str(i).encode() for i in inputs
    ]
    request = {
        "code": code,
        "function": function,
        "sizes": [len(d) for d in data],
        "parent": os.getpid(),
        "filter": seccomp_filter(os.uname().machine),
        "cpu": limits.cpu_seconds,
        "wall": limits.wall_seconds,
        "total": limits.total_seconds,
        "memory": limits.memory_mib << 20,
        "disk": limits.disk_mib << 20,
        "processes": limits.processes,
        "output": limits.output_bytes,
    }
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
    """Try the sandbox. Return None if it works, otherwise what is missing."""
    try:
        outcome = run("print(input())", ["ready"], Limits())[0]
    except SandboxError as error:
        return str(error)
    return None if outcome.ok and outcome.stdout == "ready\n" else f"a first program failed in the sandbox: {outcome}"


def _launch(request: bytes, data: list[bytes], timeout: float) -> bytes:
    """Return what the launcher wrote. Request and answer are files in memory, so that no pipe can fill up."""
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
            process.kill()  # ends the whole tree, unless it has already ended
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
    """Return what to change so that the step that failed can succeed."""
    if any(reason in message for reason in EXHAUSTED):
        return "This machine, or this user's share of it, is out of memory, processes or files."
    if "Python installation" in message:
        return "Install it elsewhere, or start as its owner."
    if not any(reason in message for reason in FORBIDDEN):
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
