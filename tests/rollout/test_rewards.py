"""Scoring in real worker processes: what a reward does wrong is an error on its rollout, never a number or a hang."""

import signal
import time

import psutil
import pytest

from hybrid_rl.rollout.generate import first_faults, reward_faults
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.types import Group, Rollout, Task
from tests.odd_rewards import KINDS_OF_EXCEPTIONS, RESULTS

TASK = Task("t", ({"role": "user", "content": "x"},), "a")


def rollout(completion: str, index: int = 0) -> Rollout:
    r = Rollout("t", 0, index, 0, [1])
    r.add_sampled([2], [-0.5], [(0, 1)])
    r.finish("stop", completion)
    return r


def run(
    name: str,
    completions: list[str],
    timeout: float = 5.0,
    module: str = "tests.rewards",
    workers: int = 2,
    **arguments,
):
    scorer = Scorer({"_target_": f"{module}.{name}", **arguments}, workers=workers, timeout=timeout)
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


def test_workers_killed_again_and_again_end_it(monkeypatch):
    scorer = Scorer({"_target_": "tests.rewards.length"}, workers=1, timeout=5.0)
    try:
        scorer.check()
        start = Scorer._start

        def start_and_kill(self):
            worker = start(self)
            worker.process.kill()
            worker.process.join()
            return worker

        monkeypatch.setattr(Scorer, "_start", start_and_kill)
        kill_workers()
        scorer.submit(rollout("a"), TASK)
        with pytest.raises(RewardError, match="killed 4 times in a row while they had nothing to do"):
            scorer.finish()
    finally:
        scorer.close()


def odd(name: str, completions: list[str], **arguments) -> dict[str, Rollout]:
    rollouts, _ = run(name, completions, module="tests.odd_rewards", **arguments)
    return {r.completion: r for r in rollouts}


@pytest.mark.parametrize("name", ["by_name", "awaited"])
def test_any_exception_is_counted_by_its_kind(name):
    """Also those that end a process or an event loop; the next completion has its reward."""
    kinds = [name for name in KINDS_OF_EXCEPTIONS if (name, "awaited") != ("StopIteration", name)]
    found = odd(name, [text for kind in kinds for text in (kind, "bool")] + ["no text", "long text"], workers=1)
    expected = {kind: kind for kind in kinds} | {"bool": None, "no text": "NoText", "long text": "ValueError"}
    if name == "awaited":
        expected["StopIteration"] = "RuntimeError"  # Python's own: no coroutine can raise it
    assert {text: r.fault for text, r in found.items()} == expected
    assert all(found[kind].error == f"{kind}: told" for kind in kinds if kind != "StopIteration")
    assert found["bool"].reward == 1.0
    assert found["no text"].error == "NoText: (without a text)"
    assert found["long text"].error.startswith("ValueError:   [31m x")
    assert len(found["long text"].error) == 501


NUMBERS = {
    "bool": 1.0, "whole": 3.0, "fraction": 0.5, "numpy": 0.5, "numpy bool": 1.0, "numpy array of none": 2.0, "torch": 0.5,
    "torch with gradient": 0.25, "parts of all": 4.0, "largest": 1e15,
}  # fmt: skip
NOT_NUMBERS = {
    "not a number": [
        "none", "text", "numpy text", "complex", "numpy complex", "list", "array", "tensor", "generator", "nested",
    ],
    "not finite": ["nan", "numpy nan", "infinite part", "overflow"],
    "too large": ["large", "large parts"],
    "no parts": ["empty"],
    "bad name of a part": ["number as name", "no name", "surrogate", "line", "long name"],
}  # fmt: skip


def test_what_counts_as_a_number():
    names = [*NUMBERS, *(name for group in NOT_NUMBERS.values() for name in group)]
    assert sorted(names) == sorted(RESULTS)
    found = odd("by_name", names, timeout=60.0)
    assert {name: found[name].reward for name in NUMBERS} == NUMBERS
    assert found["parts of all"].reward_parts == {"a": 1.0, "b": 2.0, "c": 1.0}
    assert {name: found[name].fault for kind in NOT_NUMBERS for name in NOT_NUMBERS[kind]} == {
        name: kind for kind, group in NOT_NUMBERS.items() for name in group
    }
    for r in found.values():
        str(r.error).encode()  # no half of a surrogate pair goes on into files


@pytest.mark.slow
def test_an_async_reward_has_the_same_limits():
    found = odd("awaited", ["bool", "numpy", "nan", "hang", "whole"], workers=1, timeout=4.0)
    assert {text: (r.reward, r.fault) for text, r in found.items()} == {
        "bool": (1.0, None), "numpy": (0.5, None), "nan": (None, "not finite"), "hang": (None, "timeout"), "whole": (3.0, None),
    }  # fmt: skip
    (r,), _ = run("Callable.__call__", ["x"], module="tests.odd_rewards")
    assert r.fault == "wrong arguments"


ENDS = (
    [f"code {n}" for n in (0, 1, 3, 255)]
    + [f"signal {n}" for n in (9, 11, 6, 1)]
    + ["group 9", "closed", "closed and hangs", "child", "thread"]
)


def test_a_process_that_ends_in_any_way_has_died_at_once():
    """And not after the time that a reward may take."""
    start = time.monotonic()
    found = odd("by_end", ["fine", *ENDS, "fork", "fine again"], timeout=600.0)
    assert time.monotonic() - start < 60
    assert {text: r.fault for text, r in found.items()} == {
        **dict.fromkeys(ENDS, "died"),
        "fine": None,
        "fork": None,
        "fine again": None,
    }
    assert found["code 0"].error == "its process died (exit code 0)"
    assert found["signal 11"].error == "its process died (exit code -11)"
    assert {found[text].reward for text in ("fine", "fork", "fine again")} == {0.5}


def test_what_a_reward_prints_is_capped_and_said_once(capfd):
    found = odd("chatty", [str(n) for n in range(4)])
    assert {r.reward for r in found.values()} == {1.0}
    deadline = time.monotonic() + 10
    said = ""
    while "is not shown" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.05)
    assert 60_000 < len(said) < 70_000
    assert said.count("hybrid_rl: the reward has printed 64 KiB; what it prints from now on is not shown\n") == 1
    assert said.startswith("\ufffd[31mhere")
    assert "\x1b" not in said


def test_a_machine_without_a_sandbox_is_no_fault_of_the_completion():
    with pytest.raises(RewardError, match=r"^no sandbox for code: unshare: Operation not permitted$"):
        odd("without_a_sandbox", ["b", "a", "b"])


def task(answer: str, source: str = "") -> Task:
    return Task(f"task-{answer}", TASK.messages, answer, source=source)


def test_a_reward_is_tried_before_it_is_needed():
    """Once for each source; what breaks its contract ends the run, what it may do with made-up text is told."""
    scorer = Scorer({"_target_": "tests.odd_rewards.for_answer"}, workers=1, timeout=5.0)
    try:
        assert scorer.check([]) == []
        assert scorer.check([task("whole"), task("none")]) == []  # one of each source
        (note,) = scorer.check([task("whole", "maths"), task("KeyboardInterrupt", "code")])
        tried = "reward._target_=tests.odd_rewards.for_answer, tried with a made-up completion on task "
        assert note.startswith(f"{tried}task-KeyboardInterrupt: KeyboardInterrupt: told; ")
        assert "is not finite" in scorer.check([task("nan")])[0]
        for name, message in {
            "none": "is None, not a number",
            "empty": "has no part",
            "surrogate": "part named",
            "list": "not a number",
        }.items():
            with pytest.raises(RewardError, match=f"^{tried}task-{name}: .*{message}"):
                scorer.check([task("whole", "maths"), task(name, "code")])
        scorer.submit(rollout("x"), task("whole"))
        assert scorer.finish() == 0
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import os; os._exit(0)", r"its process died \(exit code 0\)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("import time; time.sleep(60)", "it takes longer than rollout.reward_start_timeout=2 s"),
        ("import os, signal; os.kill(os.getpid(), 9)", r"its process died \(exit code -9\)"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(module, message, tmp_path, monkeypatch):
    (tmp_path / "bad_module.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    scorer = Scorer(
        {"_target_": "bad_module.reward"}, workers=2, timeout=1.0, start_timeout=2.0 if "sleep" in module else 30.0
    )
    try:
        with pytest.raises(RewardError, match=f"^the reward cannot be loaded: .*{message}"):
            scorer.check()
    finally:
        scorer.close()


def test_what_a_reward_started_ends_with_it():
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    odd("by_end", ["child"])
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] and "import time; time.sleep(60)" in p.info["cmdline"]
    ]
    assert [p for p in left if p.pid not in before] == []
