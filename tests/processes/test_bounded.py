"""A function in a process that can be killed: its answer, its exception, or what became of it."""

import os
import re
import signal
import time

import pytest

from hybrid_rl.processes.bounded import Overrun, bounded


class NoException(BaseException):
    """As a panic of a library in Rust."""


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


def test_it_gives_back_what_the_function_returns_or_raises():
    own = os.getpid()
    value, child = bounded(lambda begin: ({"a": [1, None]}, os.getpid()), 5)
    assert value == {"a": [1, None]}
    assert child != own
    with pytest.raises(KeyError, match="x"):
        bounded(lambda begin: {}["x"], 5)


def forever(begin):
    begin("the first piece")
    time.sleep(0.7)
    begin("the second piece")
    time.sleep(0.7)  # each has the whole time
    begin("a regular expression")
    while True:
        re.match(r"(x+x+)+y", "x" * 200)  # one call of C, which no handler of Python interrupts


def raising(error):
    def function(begin):
        begin("work")
        raise error

    return function


def kill(number):
    return lambda begin: os.kill(os.getpid(), number)


ENDS = {
    "too long": (forever, "a regular expression: takes more than 1 s"),
    "no Exception": (raising(NoException("first\nsecond")), "work: ended with NoException: first"),
    "exits": (lambda begin: os._exit(3), "start: ended its process (exit code 3)"),
    "is killed": (kill(signal.SIGKILL), "start: ended its process (exit code -9)"),
    "too much memory": (lambda begin: bytearray(3 * 2**30), "start: needs more than 1 GiB of memory"),
    "an answer that cannot be sent": (lambda begin: open(os.devnull), "start: TextIOWrapper: "),  # noqa: SIM115
    "an error that cannot be sent": (raising(Unpicklable("why")), "work: Unpicklable: why"),
}


@pytest.mark.parametrize("name", ENDS)
def test_other_ends_are_told_of(name):
    function, expected = ENDS[name]
    began = time.monotonic()
    with pytest.raises(Overrun) as raised:
        bounded(function, 1, memory=2**30)
    assert str(raised.value).startswith(expected)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began < 20


def test_signals_to_the_group_leave_it_alone():
    """Ctrl-C and SIGTERM ask the run to stop, which it does in its own time."""
    assert bounded(lambda begin: [os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGINT)], 5) == [
        None,
        None,
    ]


def test_a_library_may_not_write_over_the_run(capfd):
    bounded(lambda begin: os.write(2, b"thread panicked"), 5)
    assert capfd.readouterr().err == ""
