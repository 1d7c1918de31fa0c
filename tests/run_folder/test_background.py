"""Work that the next step need not wait for: in order, bounded, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from hybrid_rl.run_folder.background import Background


def test_tasks_are_done_in_order_and_flush_waits_for_the_last() -> None:
    done, background = list[int](), Background()
    background.flush()  # nothing to wait for
    for number in range(20):
        background.put(lambda number=number: done.append(number))
    background.flush()
    assert done == list(range(20))


def test_one_task_runs_and_one_waits() -> None:
    begun, free, background = threading.Event(), threading.Event(), Background()
    background.put(lambda: (begun.set(), free.wait(10)))
    assert begun.wait(10)
    background.put(lambda: None)
    third = threading.Thread(target=lambda: background.put(lambda: None))
    third.start()
    third.join(0.05)
    assert third.is_alive()  # no more rollouts are held than those of two steps
    free.set()
    third.join(10)
    background.flush()
    assert not third.is_alive()


def test_an_error_is_raised_once_by_what_comes_next() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    background, done = Background(), list[int]()
    background.put(fail)
    with pytest.raises(OSError, match="No space"):
        background.flush()
    background.put(fail)
    background._tasks.join()
    with pytest.raises(OSError, match="No space"):
        background.put(lambda: done.append(1))
    background.put(lambda: done.append(2))
    background.flush()
    assert done == [2]
