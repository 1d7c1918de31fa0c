"""Rewards that raise, return or end in every way, for tests/rollout/test_rewards.py."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction

import numpy as np

from hybrid_rl.sandbox.run import SandboxError
from hybrid_rl.types import Task


def tensor(value, dtype="float32", **how):
    import torch  # takes seconds, which only two tests need

    return torch.tensor(value, dtype=getattr(torch, dtype), **how)


KINDS_OF_EXCEPTIONS = {
    e.__name__: e
    for e in (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit, BaseException, StopIteration)
}
RESULTS = {
    "bool": lambda: True,
    "whole": lambda: 3,
    "fraction": lambda: Fraction(1, 2),
    "numpy": lambda: np.float32(0.5),
    "numpy bool": lambda: np.bool_(True),
    "numpy array of none": lambda: np.array(2),
    "torch": lambda: tensor(0.5, dtype="bfloat16"),
    "torch with gradient": lambda: tensor(0.25, requires_grad=True),
    "parts of all": lambda: {"a": np.int64(1), "b": tensor(2), "c": True},
    "largest": lambda: 1e15,
    "none": lambda: None,
    "text": lambda: "1",
    "numpy text": lambda: np.str_("1"),
    "complex": lambda: 1j,
    "numpy complex": lambda: np.complex64(1j),
    "list": lambda: [1.0],
    "array": lambda: np.ones(1),
    "tensor": lambda: tensor([1.0]),
    "generator": lambda: (x for x in (1.0,)),
    "nested": lambda: {"a": {"b": 1.0}},
    "nan": lambda: math.nan,
    "numpy nan": lambda: np.float32("nan"),
    "infinite part": lambda: {"a": 1.0, "b": -math.inf},
    "overflow": lambda: {"a": 1e308, "b": 1e308},
    "large": lambda: 1e16,
    "large parts": lambda: {"a": 1e16, "b": -1e16},
    "empty": lambda: {},
    "number as name": lambda: {1: 1.0},
    "no name": lambda: {"": 1.0},
    "surrogate": lambda: {"\ud800": 1.0},
    "line": lambda: {"a\nb": 1.0},
    "long name": lambda: {"a" * 1000: 1.0},
}


def by_name(completion: str, task: Task) -> object:
    """Raise or return what the completion names."""
    if completion in KINDS_OF_EXCEPTIONS:
        raise KINDS_OF_EXCEPTIONS[completion]("told")
    if completion == "no text":
        raise type("NoText", (Exception,), {"__str__": lambda self: sys.exit(1)})
    if completion == "long text":
        raise ValueError("\ud800\x1b[31m\n" + "x" * 10**7)
    return RESULTS[completion]()


async def awaited(completion: str, task: Task) -> object:
    await asyncio.sleep(60 if completion == "hang" else 0)
    return by_name(completion, task)


class Callable:
    def __init__(self, scale: float):
        self.scale = scale

    async def __call__(self, completion: str, task: Task) -> float:
        return self.scale


def by_end(completion: str, task: Task) -> float:
    """End or cripple the worker in the way that the completion names."""
    if completion == "closed":
        os.closerange(0, 1000)
    elif completion == "closed and hangs":
        os.closerange(0, 1000)
        time.sleep(60)
    elif completion == "child":  # it holds what its parent had open
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
        os._exit(0)
    elif completion == "fork":
        os.fork()
    elif completion == "thread":
        threading.Thread(target=os._exit, args=(0,)).start()
        time.sleep(60)
    elif completion.startswith("code "):
        os._exit(int(completion[5:]))
    elif completion.startswith("signal "):
        if completion[7:] != "9":  # whoever started the tests may have had it ignored, as nohup does
            signal.signal(int(completion[7:]), signal.SIG_DFL)
        os.kill(os.getpid(), int(completion[7:]))
    elif completion.startswith("group "):
        os.killpg(0, int(completion[6:]))
    return 0.5


def chatty(completion: str, task: Task) -> float:
    print("\x1b[31mhere\x1b[0m")
    for _ in range(10):
        print("x" * 10**6)
    os.write(2, b"y" * 10**6)
    subprocess.run([sys.executable, "-c", "print('z' * 10**6)"], check=True)
    return 1.0


def without_a_sandbox(completion: str, task: Task) -> float:
    if completion == "a":
        raise SandboxError("no sandbox for code: unshare: Operation not permitted")
    return 1.0


def for_answer(completion: str, task: Task) -> object:
    """What the task's answer names, as by_name."""
    return by_name(task.answer, task)
