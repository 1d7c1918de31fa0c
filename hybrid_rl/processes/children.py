"""Spawn child processes without importing the user's script in them.

multiprocessing's `spawn` imports the parent's main module in the child. A script that calls hybrid_rl.run.main()
without `if __name__ == "__main__":` would therefore start its run again in every worker. The workers here import their
functions by module name and need no main module.
"""

from __future__ import annotations

import threading
from multiprocessing import context, popen_spawn_posix, spawn
from multiprocessing.process import BaseProcess

_one_at_a_time = threading.Lock()


class _Popen(popen_spawn_posix.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        with _one_at_a_time:
            prepare = spawn.get_preparation_data
            spawn.get_preparation_data = lambda name: {
                key: value for key, value in prepare(name).items() if not key.startswith("init_main")
            }
            try:
                super()._launch(process_obj)  # type: ignore[misc]
            finally:
                spawn.get_preparation_data = prepare


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)


class Context(context.SpawnContext):
    """A multiprocessing context like get_context("spawn"), whose processes do not import the main module."""

    Process = _Process
