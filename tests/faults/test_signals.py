"""SIGTERM and Ctrl-C: the run ends where it can be saved, says where that is, and goes on from there to the same numbers."""

import os
import signal
import time

import pytest

from tests.faults.moments import Moment
from tests.faults.runs import Run, assert_same, finished, folder_of, left_of, run

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs

TERM, INT = signal.SIGTERM, signal.SIGINT
HEARD = "the run stops after this step and saves it, within 600 s; a second signal ends it at once"
GOES_ON = "goes on from there"
MOMENTS = [  # in which phase, the signal, where it then stands
    (Moment("load", 0, 0.01, TERM), "nothing was trained yet, and there is nothing to go on from"),
    (Moment("evaluation", 0, 0.0, INT), "the base model is evaluated and saved"),
    (Moment("imitation", 6, 0.0, TERM), "step 7 of 12 of SFT is done and saved"),
    (Moment("imitation", 11, 0.0, INT), "all before RL is done and saved"),
    (Moment("evaluation", 1, 0.0, TERM), "all before RL is done and saved"),
    (Moment("handover", 5, 0.0, TERM), "step 1 of 5 of RL is done and saved"),
    (Moment("sampling", 2, 0.01, INT), "step 3 of 5 of RL is done and saved"),
    (Moment("update", 1, 0.0, TERM), "step 2 of 5 of RL is done and saved"),
    (Moment("evaluation", 2, 0.0, TERM), "step 3 of 5 of RL is done and saved"),
    (Moment("write", 4, 0.0, INT), "of RL is done and saved"),
    (Moment("evaluation", 4, 0.0, TERM), "all steps are done and saved, the last evaluation and the export are left"),
]
SLOW = {"write", "handover", "update"}


def param(moment: Moment, where: str):
    marks = [pytest.mark.slow] if moment.phase in SLOW or moment.call in (11, 1) else []
    return pytest.param(moment, where, marks=marks, id=f"{moment.phase}-{moment.call}")


@pytest.mark.parametrize(("moment", "where"), [param(*each) for each in MOMENTS])
def test_a_signal_in_any_phase(wholes, tmp_path, moment, where):
    output = run(tmp_path, moment=moment, code=128 + moment.happens)
    assert f"hybrid_rl: {signal.Signals(moment.happens).name}: {HEARD}\n" in output
    assert output.splitlines()[-1].startswith(f"hybrid_rl: {signal.Signals(moment.happens).name}: ")
    assert where in output.splitlines()[-1]
    assert output.splitlines()[-1].endswith(GOES_ON) == ("nothing to go on" not in where)
    assert not left_of(tmp_path)
    output = run(tmp_path, "resume=auto" if "nothing to go on" in where else "resume=must")
    assert ("begins again" in output) == ("nothing to go on" in where)
    assert_same(wholes[1], tmp_path)


def test_a_signal_during_the_export_comes_too_late(wholes, tmp_path):
    """The run is complete then, and a scheduler that starts it again at 143 would start another one."""
    assert HEARD in run(tmp_path, moment=Moment("export", 0, 0.0, TERM))
    assert_same(wholes[1], tmp_path)


@pytest.mark.parametrize(("phase", "call"), [("imitation", 6), ("sampling", 2), ("evaluation", 0)])
def test_ranks_agree_where_they_stop_though_one_alone_was_told(wholes, tmp_path, phase, call):
    output = run(tmp_path, ranks=2, moment=Moment(phase, call, 0.0, TERM), victim=1, code=143)
    assert output.count(GOES_ON) == 1
    run(tmp_path, "resume=must", ranks=2)
    assert_same(wholes[2], tmp_path)


def sleep() -> None:
    print("asleep", flush=True)
    time.sleep(60)


def test_a_second_signal_ends_at_once(wholes, tmp_path):
    started = Run(tmp_path, moment=Moment("update", 2, 0.0, sleep))
    started.wait_for("asleep")
    pid, since = started.processes[0].pid, time.monotonic()
    for pause in (0.1, 2.0, 0):  # the second one within a second is the same wish, delivered twice
        os.kill(pid, TERM)
        time.sleep(pause)
    assert started.wait() == [143]
    assert time.monotonic() - since < 10
    assert not left_of(tmp_path)
    run(tmp_path, "resume=must")
    assert_same(wholes[1], tmp_path)


def test_a_step_that_takes_longer_than_stop_timeout_is_not_waited_for(tmp_path):
    started = Run(tmp_path, "stop_timeout=1", moment=Moment("update", 2, 0.0, sleep))
    started.wait_for("asleep")
    since = time.monotonic()
    os.kill(started.processes[0].pid, INT)
    assert started.wait() == [130]
    assert time.monotonic() - since < 10
    assert not finished(tmp_path)
    assert folder_of(tmp_path)
