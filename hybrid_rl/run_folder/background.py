"""Do what the next step need not wait for in a thread: the files of a step's rollouts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """Call functions one after the other in a thread; at most one waits while another runs.

    An error is raised by the next `put` or `flush`; what was put in between is dropped.
    """

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue(1)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, task: Callable[[], None]) -> None:
        """Call `task` later; wait while another one waits already. Raises the error of an earlier one."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="background", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def flush(self) -> None:
        """Wait until all is done. Raises the error of an earlier task."""
        self._tasks.join()
        self._raise()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                if self._error is None:
                    task()
            except BaseException as error:  # raised again in the caller's thread
                self._error = error
            del task  # and the rollouts that it holds
            self._tasks.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
