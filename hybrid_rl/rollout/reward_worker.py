"""A worker process of the rewards: load the reward and the environment once, then answer what is sent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from hydra.errors import InstantiationException

from hybrid_rl.rollout.conversations import Environments
from hybrid_rl.rollout.reward_call import Result, Reward, describe


def work(pipe: Connection, reward: dict[str, Any], environment: dict[str, Any], output: Connection) -> None:
    """Run the process: load what the two settings name, then answer each (completions, tasks) with a result for each.

    With an environment the completions are what was said in conversations.

    The first message is ("", whether it gains from several completions at a time), or (why it cannot be loaded, False).
    """
    os.setpgrp()  # what the reward starts ends with it, see Worker.kill
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.SIG_IGN
        )  # sent to a whole process group they are meant for the run, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    try:
        scored = Reward(reward) if reward else None
        asked = Environments(environment, scored) if environment else scored
        assert asked is not None
    except BaseException as error:  # a module may raise anything
        cause = error.__cause__ if isinstance(error, InstantiationException) else None
        return pipe.send((describe(cause or error), False))
    pipe.send(("", asked.many))
    own = os.getpid()
    while True:
        try:
            completions, tasks = pipe.recv()
        except EOFError:
            return
        results: list[Result] = asked.score(completions, tasks)
        if os.getpid() != own:  # the reward forked, and its child came back too
            os._exit(0)
        pipe.send(results)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
