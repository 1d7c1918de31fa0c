"""Rewards in worker processes, so that scoring overlaps generation and no reward can hang or crash the run.

A reward is a function (completion: str, task: Task) → number, or → {part: number} whose sum is the reward, or a pair of
either with {measure: number}, which is logged and not paid (a measure named "answer" is a text: the answer it found,
for majority votes); it may be `async`, and one of (completions, tasks) gets lists and returns a list. Whatever it does
instead (raise, hang, return something else, end its process) becomes an error on the rollout: counted by its kind,
never invented.

With an environment the same processes hold its conversations, and an answer may be another turn.
"""

from __future__ import annotations

import atexit
import codecs
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from types import MappingProxyType
from typing import Any

from hybrid_rl.processes import hangs
from hybrid_rl.processes.children import Context
from hybrid_rl.rollout.conversations import Said
from hybrid_rl.rollout.reward_call import CONTRACT, DIED, TIMEOUT, Result, RewardFault, Score, Turn, Unusable
from hybrid_rl.rollout.reward_worker import work
from hybrid_rl.types import Rollout, Task

STARTS = 3  # of a worker that the system kills, one after the other, before the machine is called broken
OUTPUT = 1 << 16  # bytes that the rewards of a run may print
CONTEXT = Context()
# What a reward is tried with. A reward that runs the code of completions runs this.
MADE_UP = "This is a made-up completion.\n\n```python\nprint(1)\n```\n"
MOST_TRIALS = 8  # tasks, each of another source


class RewardError(RuntimeError):
    """No reward could be had, or too few."""


class _Ended(Exception):
    """A worker process is no more, or does not answer; the exit code is None if it lived on."""

    def __init__(self, exit_code: int | None):
        super().__init__(
            f"its process died (exit code {exit_code})"
            if exit_code is not None
            else "its process closed its connection"
        )
        self.exit_code = exit_code


@dataclass(slots=True)
class _Asked:
    completion: str | Said
    task: Task
    rollout: Rollout | None = None
    result: Future[Result] = field(default_factory=Future)


class Scorer:
    """`workers` processes that each loaded the reward once. One reward may take `timeout` seconds, then its worker is replaced.

    A batched or async reward gets up to `batch` completions at a time, for which `timeout` is one limit; when they pass
    it, or end the process, each is scored alone, so that only the one at fault has no reward.
    """

    def __init__(
        self,
        reward: Mapping[str, Any],
        workers: int,
        timeout: float,
        start_timeout: float = 60.0,
        batch: int = 1,
        environment: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.reward, self.timeout, self.start_timeout, self.batch = dict(reward), timeout, start_timeout, batch
        self.environment = dict(environment)
        self._pending: list[_Asked] = []
        # one for all workers; with an environment one for each, which keeps its conversations
        self._queues: list[queue.SimpleQueue[_Asked | None]] = [queue.SimpleQueue()] * workers
        if environment:
            self._queues = [queue.SimpleQueue() for _ in range(workers)]
        self._loaded: Future[None] = Future()
        self._broken: RewardError | None = None
        self._closed = False
        self._workers: set[_Worker] = set()
        self._output = _Output()
        self._threads = [threading.Thread(target=self._attend, args=(own,), daemon=True) for own in self._queues]
        for thread in self._threads:
            thread.start()  # the processes load the reward now, while the model still loads
        atexit.register(self.close)

    def check(self, tasks: Sequence[Task] = ()) -> list[str]:
        """Wait until a worker has loaded the reward, and try it on one task of each source; returns what a person should know.

        Raises RewardError if it cannot be loaded or used on this machine, or returns something else than a number or
        {part: number}. What else it does with a made-up completion is only told.
        """
        self._loaded.result()
        first = {task.source: task for task in reversed(tasks)}
        tried = [*first.values()][-MOST_TRIALS:]
        asked = [
            _Asked(Said(-1 - i, (MADE_UP,), ended=True) if self.environment else MADE_UP, task)
            for i, task in enumerate(tried)
        ]
        for each in asked:
            self._put(each)
        notes = []
        for each in asked:
            result = self._result(each)
            if isinstance(result, RewardFault):
                line = f"{self._name()}, tried with a made-up completion on task {each.task.id}: {result.text}"
                if result.kind in CONTRACT:
                    raise RewardError(line)
                notes.append(f"{line}; if it does so with sampled completions, their groups are replaced")
        return notes

    def _name(self) -> str:
        if self.environment:
            return f"environment._target_={self.environment['_target_']}"
        return f"reward._target_={self.reward['_target_']}" if "_target_" in self.reward else "reward"

    def submit(self, rollout: Rollout, task: Task, said: Said | None = None) -> None:
        """Let a worker score the rollout's completion, or tell its environment what was `said`."""
        self._pending.append(_Asked(rollout.completion if said is None else said, task, rollout))
        self._put(self._pending[-1])

    def _put(self, asked: _Asked) -> None:
        key = asked.completion.key if isinstance(asked.completion, Said) else 0
        self._queues[key % len(self._queues)].put(asked)

    def finish(self) -> int:
        """Do what `settle` does, and return the number of rewards that failed."""
        rollouts = [asked.rollout for asked in self._pending]
        self.settle()
        return sum(rollout is not None and rollout.error is not None for rollout in rollouts)

    def settle(self) -> list[tuple[Rollout, Turn]]:
        """Wait for everything submitted, record each reward, or its error, on its rollout, and return the other turns.

        Raises RewardError if rewards cannot be had on this machine any more.
        """
        turns = []
        for asked in self._pending:
            result, rollout = self._result(asked), asked.rollout
            assert rollout is not None
            if isinstance(result, Turn):
                turns.append((rollout, result))
            elif isinstance(result, RewardFault):
                rollout.error, rollout.fault = result.text, result.kind
            else:
                rollout.score(result.reward, result.parts, result.measures, result.extracted)
                if result.cut and rollout.finish_reason == "stop":  # no answer was left
                    rollout.finish("turns", rollout.completion)
            hangs.progress()
        self._pending.clear()
        return turns

    def _result(self, asked: _Asked) -> Score | RewardFault | Turn:
        while not wait([asked.result], timeout=1.0).done:
            if self._broken:
                raise self._broken
        result = asked.result.result()
        if isinstance(result, Unusable):
            raise RewardError(result.text)
        return result

    def _attend(self, own: queue.SimpleQueue[_Asked | None]) -> None:
        """Attend one worker process after another until the scorer is closed; what is in `own` goes to it one by one, and
        is answered in bounded time.
        """
        asked: list[_Asked] = []
        alone: list[_Asked] = []  # of a batch that failed
        idle_deaths = 0
        worker = None
        try:
            while not self._closed:
                worker = self._start()
                while worker.alive() or not asked:
                    asked = asked or ([alone.pop(0)] if alone else self._next(own, self.batch if worker.many else 1))
                    if not asked or self._closed:
                        return
                    if not worker.alive():  # the system killed it while it had nothing to do
                        break
                    results = worker.score(asked, self.timeout)
                    if len(asked) > 1 and isinstance(results, RewardFault):
                        alone, results = asked, []
                    elif isinstance(results, RewardFault):
                        results = [results]
                    for each, result in zip(asked, results, strict=False):
                        each.result.set_result(result)
                    asked, idle_deaths = [], 0
                    if not worker.alive():
                        break
                self._end(worker)
                idle_deaths += bool(asked)
                if idle_deaths > STARTS:
                    raise RewardError(
                        f"processes of the reward were killed {idle_deaths} times in a row while they had nothing to do"
                    )
        except RewardError as error:
            self._break(error)
        except BaseException as error:  # whatever it is, nobody may wait for this thread
            self._break(RewardError(f"the rewards' processes cannot be attended: {type(error).__name__}: {error}"))
        finally:
            if worker:
                self._end(worker)

    def _next(self, own: queue.SimpleQueue[_Asked | None], most: int) -> list[_Asked]:
        """Wait for something to score; return up to `most` of what there is, [] when the scorer is closed."""
        asked = own.get()
        found = [] if asked is None else [asked]
        while found and len(found) < most:
            try:
                asked = own.get_nowait()
            except queue.Empty:
                break
            if asked is None:  # for the next call
                own.put(None)
                break
            found.append(asked)
        return found

    def _break(self, error: RewardError) -> None:
        if not self._closed:
            self._broken = error
            with suppress(Exception):  # it was loaded before
                self._loaded.set_exception(error)

    def _start(self) -> _Worker:
        """Return a process that has loaded the reward. Raises RewardError with the reason if none can."""
        for _ in range(STARTS):
            worker = _Worker(self.reward, self.environment, self._output)
            self._workers.add(worker)
            if self._closed:
                worker.kill()
            try:
                problem, worker.many = worker.ask(None, self.start_timeout)
            except TimeoutError:
                problem = f"it takes longer than rollout.reward_start_timeout={self.start_timeout:g} s"
            except _Ended as ended:
                problem = str(ended)
                if (
                    ended.exit_code is not None and ended.exit_code < 0 and not self._closed
                ):  # by a signal: the system's doing, perhaps
                    self._end(worker)
                    continue
            if not problem:
                with suppress(Exception):  # another one was first
                    self._loaded.set_result(None)
                return worker
            self._end(worker)
            break
        what = "environment" if self.environment else "reward"
        raise RewardError(f"the {what} cannot be loaded: {problem}")

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.discard(worker)

    def close(self) -> None:
        """End the processes; what is still owed is not answered any more."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for own in self._queues:
            own.put(None)
        for worker in list(self._workers):
            worker.process.kill()  # its thread notices, and does the rest
        for thread in self._threads:
            thread.join(10)
        self._output.close()


class _Worker:
    """One process, seen from the thread that attends it."""

    def __init__(self, reward: dict[str, Any], environment: dict[str, Any], output: _Output):
        self.killed = self.many = False
        self.pipe, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(there, reward, environment, output.writer))
        self.process.start()
        there.close()

    def alive(self) -> bool:
        """Two signs: a process that it started may hold the sentinel open, and another thread may be about to reap it."""
        return self.process.is_alive() and not wait_for([self.process.sentinel], 0)

    def score(self, asked: Sequence[_Asked], timeout: float) -> list[Result] | RewardFault:
        """Return its answers; what it cannot report itself becomes one fault, after which it has ended."""
        try:
            return self.ask(([each.completion for each in asked], [each.task for each in asked]), timeout)
        except TimeoutError:
            fault = RewardFault(TIMEOUT, f"timed out after {timeout:g} s")
        except _Ended as ended:
            fault = RewardFault(DIED, str(ended))
        self.kill()
        return fault

    def ask(self, message: object, timeout: float) -> Any:
        """Send `message`, if there is one, and return what the process sends next. Raises TimeoutError or _Ended."""
        deadline = time.monotonic() + timeout
        try:
            if message is not None:
                self.pipe.send(message)
            while not self.pipe.poll(min(0.2, max(0.0, deadline - time.monotonic()))):
                if not self.alive() and not self.pipe.poll():  # a process that it started may hold the pipe open
                    raise EOFError
                if time.monotonic() > deadline:
                    raise TimeoutError
            return self.pipe.recv()
        except TimeoutError:
            raise
        except Exception:  # the pipe is closed, or holds what is no message
            patience = time.monotonic() + 1.0
            while (
                self.process.is_alive() and time.monotonic() < patience
            ):  # join waits for ever if the sentinel alone is closed
                time.sleep(0.01)
            raise _Ended(self.process.exitcode) from None

    def kill(self) -> None:
        """And all that it started."""
        if self.killed:  # its number may be another's by now
            return
        self.killed = True
        assert self.process.pid
        with suppress(OSError):  # it has no group yet, or nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Output:
    """What the workers print, passed on to standard error up to OUTPUT bytes."""

    def __init__(self) -> None:
        self._reader, self.writer = CONTEXT.Pipe(duplex=False)
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        left, decoder = OUTPUT, codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := os.read(self._reader.fileno(), 1 << 16):
            if left > 0:
                text = decoder.decode(chunk[:left])
                left -= len(chunk)
                if left <= 0:
                    text += f"\nhybrid_rl: the reward has printed {OUTPUT >> 10} KiB; what it prints from now on is not shown\n"
                with suppress(OSError, ValueError):  # closed
                    sys.stderr.write("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
                    sys.stderr.flush()
        self._reader.close()

    def close(self) -> None:
        """Pass on what was printed until now, and end."""
        self.writer.close()
