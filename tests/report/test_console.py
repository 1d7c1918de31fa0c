"""What a terminal shows: only what was measured, no more than the whole, and nothing that steers it."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console as RichConsole

from hybrid_rl.report.console import NOTHING, Console, step_line, visible


def step(**changes: object) -> dict[str, object]:
    return {
        "step": 3, "reward": 0.5, "reward_std": 0.25, "length": 28.0, "truncated": 0.01, "entropy": 0.4, "mismatch_kl": 1e-9,
        "clip_fraction": 0.02, "grad_norm": 0.8, "tokens_per_second": 20000.0, "memory_gib": 0.7, "silent_groups": 0, "reward_errors": 0,
        "missing_groups": 0, "skipped": 0, "seconds": {"rollout": 0.3, "sleep": 0.001}, "trained": 8, "nothing_trained": None,
    } | changes  # fmt: skip


def test_a_step_with_an_update_shows_what_was_measured() -> None:
    assert step_line(step(), 20) == (
        "step  3/20  reward 0.500±0.25  len 28.0  trunc 1.0%  entropy 0.400  mismatch 1e-09  clip 2.0%  grad 0.80  20.0k tok/s  0.70 GiB  "
        "0.30 s (rollout 0.30)"
    )
    assert "reference 0e+00  clip" in step_line(step(reference_kl=0.0), 20)
    only_the_critic = step(entropy=None, mismatch_kl=None, clip_fraction=None, grad_norm=None)
    assert step_line(only_the_critic, 20).endswith("trunc 1.0%  20.0k tok/s  0.70 GiB  0.30 s (rollout 0.30)")


def test_a_step_of_groups_from_earlier_steps_shows_how_old_its_tokens_are() -> None:
    older = {
        "lag": {"0": 0.5, "2": 0.25, "11": 0.25},
        "lag_mean": 3.25,
        "continued_rollouts": 7,
        "discarded_rollouts": 0,
    }
    assert "trunc 1.0%  lag 3.25 (most 11)  continued 7  entropy 0.400" in step_line(step(**older), 20)
    assert "discarded" not in step_line(step(**older), 20)
    line = step_line(step(**(older | {"discarded_rollouts": 16})), 20)
    assert line.endswith("  ! 16 rollouts discarded as too old")


@pytest.mark.parametrize("why", NOTHING)
def test_a_step_without_one_says_why_and_shows_no_numbers_of_an_update(why: str) -> None:
    nothing = {"entropy": None, "mismatch_kl": None, "clip_fraction": None, "grad_norm": None, "reference_kl": None}
    line = step_line(step(nothing_trained=why, silent_groups=4, **nothing), 20)
    assert f"  ! nothing was trained: {NOTHING[why][0]}, 4 silent groups replaced" in line
    assert not re.search("entropy|mismatch 1|grad [0-9]|reference|clip|None|nan", line)


STEERING = "a\x1b[31m\x07\x00\x7f\x9b2J\u061c\u202e\u2066\u200e\u2028\ud800\r!"


def test_nothing_that_steers_a_terminal_reaches_it(capsys: pytest.CaptureFixture) -> None:
    assert visible(STEERING) == r"a\x1b[31m\x07\x00\x7f\x9b2J\u061c\u202e\u2066\u200e\u2028\ud800\r!"
    assert visible("plain, naïve\t日本 😀👩\u200d🚀\n") == "plain, naïve\t日本 😀👩\u200d🚀\n"
    console = Console()
    console.say(STEERING)
    console.heading(STEERING)
    console.reward_faults({"raised": STEERING})
    assert capsys.readouterr().out.count(r"a\x1b[31m\x07\x00\x7f\x9b2J\u061c\u202e\u2066\u200e\u2028\ud800\r!") == 3


def test_progress_never_passes_the_whole() -> None:
    """Replaced groups add to it; a rank that counts for others may be ahead."""
    console, file = Console(), io.StringIO()
    console._rich = RichConsole(force_terminal=True, file=file, width=200)
    with console.progress("sampling\x1b[5m", 8) as advance:
        for _ in range(3):
            advance(3)
        advance(0, more=4)
        for _ in range(2):
            advance(3, note="\x1b[5m")
    counts = [(int(done), int(whole)) for done, whole in re.findall(r"(\d+)/(\d+)", file.getvalue())]
    assert counts[0] == (0, 8)
    assert counts[-1] == (12, 12)
    assert all(done <= whole for done, whole in counts)
    assert "\x1b[5m" not in file.getvalue()
