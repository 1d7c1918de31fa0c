"""Scoring in real worker processes: what a reward does wrong is an error on its rollout, never a number or a hang."""

import signal
import time

import psutil
import pytest

from hybrid_rl.rollout.generate import first_faults, reward_faults
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.types import Group, Rollout, Task

TASK = Task("t", ({"role": "user", "content": "x"},), "a")


def rollout(completion: str, index: int = 0) -> Rollout:
    r = Rollout("t", 0, index, 0, [1])
    r.add_sampled([2], [-0.5], [(0, 1)])
    r.finish("stop", completion)
    return r


def run(name: str, completions: list[str], timeout: float = 5.0, **arguments):
    scorer = Scorer({"_target_": f"tests.rewards.{name}", **arguments}, workers=2, timeout=timeout)
    try:
        scorer.check()
        rollouts = [rollout(c, i) for i, c in enumerate(completions)]
        for r in rollouts:
            scorer.submit(r, TASK)
        return rollouts, scorer.finish()
    finally:
        scorer.close()


def test_each_completion_gets_its_own_reward_and_arguments_reach_the_function():
    rollouts, errors = run("length", ["a" * n for n in range(20)], scale=0.5)
    assert [r.reward for r in rollouts] == [n * 0.5 for n in range(20)]
    assert errors == 0


def test_named_parts_add_up():
    (r,), _ = run("parts", ["x"])
    assert r.reward == 0.75
    assert r.reward_parts == {"format": 0.25, "truth": 0.5}


FAULTS = {
    "raise": ("KeyError", "KeyError: 'no such answer'"),
    "hang": ("timeout", "timed out after 1 s"),
    "die": ("died", "its process died (exit code 7)"),
    "exit": ("SystemExit", "SystemExit: 3"),
    "odd": ("Odd", "Odd: first"),
    "own timeout": ("TimeoutError", "TimeoutError: the checker's host does not answer"),
    "nan": ("not finite", "reward nan with parts {'reward': nan} is not finite"),
    "inf": ("not finite", "reward nan with parts {'a': inf, 'b': -inf} is not finite"),
    "huge": ("OverflowError", "OverflowError: int too large to convert to float"),
    "text": ("not a number", "the reward's part 'reward' is '1.0', not a number"),
    "nothing": ("not a number", "the reward's part 'reward' is None, not a number"),
}


def test_every_kind_of_failure_is_counted_and_spares_the_others():
    rollouts, errors = run("by_order", ["fine", *FAULTS, "lambda", "fine"], timeout=1.0)
    assert errors == len(FAULTS) + 1
    assert rollouts[0].reward == rollouts[-1].reward == 1.0
    assert {r.completion: (r.fault, r.error) for r in rollouts[1:-2]} == FAULTS
    assert rollouts[-2].fault == "not a number"
    assert all(r.reward is None for r in rollouts[1:-1])
    group = Group(0, TASK, rollouts)
    kinds = {
        "KeyError": 1,
        "Odd": 1,
        "SystemExit": 1,
        "TimeoutError": 1,
        "died": 1,
        "not a number": 3,
        "not finite": 2,
        "timeout": 1,
        "OverflowError": 1,
    }
    assert reward_faults([group]) == {("unnamed", kind): count for kind, count in kinds.items()}
    assert first_faults([group])["not finite"] == f"task t: {FAULTS['nan'][1]}"


def test_a_reward_that_cannot_be_loaded_says_why():
    scorer = Scorer({"_target_": "tests.rewards.missing"}, workers=1, timeout=1.0)
    try:
        with pytest.raises(RewardError, match="missing"):
            scorer.check()
    finally:
        scorer.close()


def test_scoring_runs_beside_its_caller_and_leaves_no_process():
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    scorer = Scorer({"_target_": "tests.rewards.by_order"}, workers=2, timeout=2.0)
    scorer.check()
    start = time.perf_counter()
    scorer.submit(rollout("hang"), TASK)
    assert time.perf_counter() - start < 1.0  # submitting does not wait for the reward
    scorer.close()
    for process in psutil.Process().children(recursive=True):
        if process.pid not in before and "resource_tracker" not in " ".join(process.cmdline()):
            process.wait(timeout=10)


@pytest.mark.parametrize("at_work", [True, False])
def test_workers_take_no_notice_of_what_is_meant_for_the_run(at_work):
    """SIGTERM and Ctrl-C to a whole process group."""
    scorer = Scorer({"_target_": "tests.rewards.slow"}, workers=2, timeout=5.0)
    try:
        scorer.check()
        rollouts = [rollout("a" * n, n) for n in range(4)]
        for r in rollouts[: 3 * at_work]:
            scorer.submit(r, TASK)
        time.sleep(0.2)
        workers = [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]
        assert len(workers) >= 2
        for worker in workers:
            worker.terminate()
            worker.send_signal(signal.SIGINT)
        for r in rollouts[3 * at_work :]:
            scorer.submit(r, TASK)
        assert scorer.finish() == 0
        assert [r.reward for r in rollouts] == [0, 1, 2, 3]
    finally:
        scorer.close()


@pytest.mark.parametrize("when", ["before", "between", "never"])
def test_workers_killed_while_they_have_nothing_to_do_are_replaced(when):
    """As the system does where memory runs out: no reward is lost, before the first one, while some are asked for, between two steps."""
    scorer = Scorer({"_target_": "tests.rewards.length"}, workers=2, timeout=5.0)
    try:
        scorer.check()
        rollouts = [rollout("a" * n, n) for n in range(4)]
        for i, r in enumerate(rollouts):
            if i == {"before": 0, "between": 2, "never": 4}[when]:
                kill_workers()
            scorer.submit(r, TASK)
        assert scorer.finish() == 0
        kill_workers()
        more = rollout("aaaa")
        scorer.submit(more, TASK)
        assert scorer.finish() == 0
        assert [r.reward for r in [*rollouts, more]] == [0, 1, 2, 3, 4]
    finally:
        scorer.close()


def kill_workers():
    time.sleep(0.3)  # until they have nothing to do
    for worker in psutil.Process().children():
        if "spawn_main" in " ".join(worker.cmdline()):
            worker.kill()  # and no wait: the pool must learn itself that it is gone
    time.sleep(0.3)


def test_workers_killed_again_and_again_end_it():
    scorer = Scorer({"_target_": "tests.rewards.length"}, workers=1, timeout=5.0)
    try:
        scorer.check()
        scorer.submit(rollout("a"), TASK)
        for _ in range(3):
            scorer._renew()
        with pytest.raises(RewardError, match="killed 4 times in one step while they had nothing to do"):
            scorer._renew()
    finally:
        scorer.close()
