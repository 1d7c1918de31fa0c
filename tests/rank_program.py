"""Stands in for hybrid_rl.stages in the tests of the launcher: what a run does is the function that the environment names."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from pathlib import Path
from unittest.mock import patch

from hybrid_rl.processes import hangs, signals

DOES = "RANK_PROGRAM_DOES"


class Skewed(datetime.datetime):
    """Another rank, another clock."""

    __slots__ = ()

    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(hours=int(os.environ.get("RANK", "0")))


def run(config, folder: Path, ranks, command: str) -> int:
    from torch import distributed

    group = distributed.is_initialized()
    facts = {"pid": os.getpid(), "rank": ranks.rank, "world": ranks.world, "folder": str(folder), "group": group}
    os.makedirs("facts", exist_ok=True)
    Path("facts", f".{os.getpid()}").write_text(json.dumps(facts))
    os.rename(f"facts/.{os.getpid()}", f"facts/{os.getpid()}.json")
    code = globals()[os.environ[DOES]](config, ranks)
    if ranks.main and not code:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text("{}")  # what marks a finished run
    return code


def agrees(config, ranks) -> int:
    assert [r for r, _ in ranks.all_gather((ranks.rank, "x" * 100_000))] == list(range(ranks.world))
    if ranks.main:
        time.sleep(0.5)  # the others are done sooner
        print(f"{ranks.world} ranks agree", flush=True)
    return 0


def works(config, ranks) -> int:
    """Until it is asked to stop, with a reward worker as a run has, and a program that takes no notice of anything."""
    from hybrid_rl.rollout.rewards import Scorer

    scorer = Scorer(config.reward, 1, 10)
    scorer.check()
    subprocess.Popen(["sleep", "100"])
    try:
        with hangs.phase("rollout"):
            ranks.all_gather(None)  # all are in this phase
            if ranks.main:
                print("at work", flush=True)
            while not (number := ranks.largest(signals.asked())):
                ranks.all_gather(ranks.rank)
                time.sleep(0.01)
                hangs.progress()
        if ranks.main:
            print("saved", flush=True)
        return 128 + number
    finally:
        scorer.close()


def does_not_stop(config, ranks) -> int:
    """As `works`, in a step that takes long."""
    with patch.object(signals, "asked", lambda: 0):
        return works(config, ranks)


def second_raises(config, ranks) -> int:
    ranks.all_gather(None)
    if ranks.rank == 1:
        raise ValueError("this is not right")
    ranks.all_gather(None)
    return 0


def main_raises_for_all(config, ranks) -> int:
    ranks.from_main(lambda: [][0])
    return 0


def fails(config, ranks) -> int:
    from hybrid_rl.processes.launch import after_rank_0

    ranks.all_gather(None)
    after_rank_0()
    print("no such model", flush=True)
    return 1


def begins(config, ranks) -> None:
    """As `works` does: a reward worker, another program, and the word that all are there."""
    from hybrid_rl.rollout.rewards import Scorer

    Scorer(config.reward, 1, 10).check()
    subprocess.Popen(["sleep", "100"])
    ranks.all_gather(None)
    if ranks.main:
        print("at work", flush=True)


def hangs_forever() -> None:
    time.sleep(1000)


def ends_when_seen() -> None:
    """End this process once the test has listed what it started."""
    for _ in range(600):
        if Path("seen").exists():
            break
        hangs.progress()
        time.sleep(0.05)
    os._exit(0)


def second_hangs(config, ranks) -> int:
    begins(config, ranks)
    with hangs.phase("rollout"):
        if ranks.rank == 1:
            hangs_forever()
        ranks.all_gather(None)
    return 0


def second_hangs_before_any_phase(config, ranks) -> int:
    begins(config, ranks)
    if ranks.rank == 1:
        hangs_forever()
    ranks.all_gather(None)
    return 0


def first_hangs_after_the_second_has_ended(config, ranks) -> int:
    """In what comes after the last phase, where nobody waits for anybody."""
    with hangs.phase("rollout"):
        begins(config, ranks)
    hangs_forever() if ranks.main else ends_when_seen()


def first_waits_for_the_second_that_has_ended(config, ranks) -> int:
    begins(config, ranks)
    with hangs.phase("update"), hangs.waiting():
        hangs_forever() if ranks.main else ends_when_seen()


def second_is_slow(config, ranks) -> int:
    with hangs.phase("update"):
        for _ in range(60 if ranks.rank == 1 else 0):
            time.sleep(0.1)
            hangs.progress()
        ranks.all_gather(None)
    return agrees(config, ranks)


def each_waits(config, ranks) -> int:
    """A rank that waits for what the other never sends."""
    from torch import distributed

    tensor = __import__("torch").zeros(1)
    with hangs.phase("update"), hangs.waiting():
        distributed.recv(tensor, src=1 - ranks.rank)
    return 0


def one_hangs(config, ranks) -> int:
    begins(config, ranks)
    with hangs.phase("rollout"):
        hangs_forever()
    return 0
