"""Call a function in a child process that is killed when it takes too long or too much memory.

Use it for code that cannot be interrupted otherwise: regular expressions and template programs that come with a model.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")
Begin = Callable[[str], None]  # the function calls it before each part of its work, with a description of that part
SECONDS = 60  # default time limit of one part
TEXT = 4096  # bytes reserved for the description


class Overrun(RuntimeError):
    """The function did not finish: `doing` is the part of the work that was running, `text` what happened to it."""

    def __init__(self, doing: str, text: str):
        super().__init__(f"{doing}: {text}")
        self.doing, self.text = doing, text


def bounded(function: Callable[[Begin], T], seconds: int, memory: int = 4 * 2**30) -> T:
    """Return `function(begin)`, called in a fork of this process, or raise the exception that it raised.

    The function calls begin(description) before each part of its work. Raises Overrun when one part takes longer than
    `seconds`, when the child needs more than `memory` bytes beyond those of this process, or when the child ends
    without a result.
    """
    doing = mmap.mmap(-1, TEXT)  # shared with the child
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(function, seconds, memory, doing, sender), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # this process has threads; the child uses none of their state
        child.start()
    sender.close()
    try:
        good, value = receiver.recv()
    except EOFError:
        good, value = False, None
    child.join()
    at = doing[:].rstrip(b"\0").decode(errors="replace")
    if good:
        return value
    if isinstance(value, Exception):
        raise value
    if value is None:
        late = child.exitcode == -signal.SIGALRM
        value = f"takes more than {seconds} s" if late else f"ended its process (exit code {child.exitcode})"
    raise Overrun(at, value)


def _work(function: Callable[[Begin], Any], seconds: int, memory: int, doing: mmap.mmap, sender: Connection) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a signal to the process group is for the run, which ends its children
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel then ends the child even inside C code
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide what a library prints when it aborts
    _limit_memory(memory)

    def begin(what: str) -> None:
        signal.alarm(seconds)
        doing[:] = what.encode(errors="replace")[:TEXT].ljust(TEXT, b"\0")

    begin("start")
    try:
        answer = True, function(begin)
    except MemoryError:
        answer = False, f"needs more than {memory / 2**30:.0f} GiB of memory"
    except Exception as error:
        answer = False, error
    except BaseException as error:  # a panic in a Rust library is no Exception
        first = next(iter(str(error).strip().splitlines()), "")
        answer = False, f"ended with {type(error).__name__}: {first}"
    try:
        sender.send(answer)
    except Exception as error:  # it cannot be pickled
        sender.send((False, f"{type(answer[1]).__name__}: {answer[1]} ({error})"))


def _limit_memory(more: int) -> None:
    """Limit this process to `more` bytes of data beyond what it has now.

    RLIMIT_DATA is compared with exactly VmData, which psutil does not report (its `data` includes the stack).
    """
    try:
        with open("/proc/self/status") as status:
            used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    except (FileNotFoundError, StopIteration):  # not on Linux
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
