"""Stands in for hybrid_rl.stages in the tests of the launcher: what a run does is the function that the environment names."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

DOES = "RANK_PROGRAM_DOES"


def run(config, folder: Path, ranks) -> int:
    facts = {"pid": os.getpid(), "rank": ranks.rank, "world": ranks.world, "folder": str(folder)}
    os.makedirs("facts", exist_ok=True)
    Path("facts", f".{os.getpid()}").write_text(json.dumps(facts))
    os.rename(f"facts/.{os.getpid()}", f"facts/{os.getpid()}.json")
    try:
        return globals()[os.environ[DOES]](config, ranks)
    except KeyboardInterrupt:
        if ranks.main:
            print("interrupted", flush=True)
        return 130


def agrees(config, ranks) -> int:
    assert [r for r, _ in ranks.all_gather((ranks.rank, "x" * 100_000))] == list(range(ranks.world))
    if ranks.main:
        print(f"{ranks.world} ranks agree", flush=True)
    return 0


def works(config, ranks) -> int:
    """Until it is ended, with a reward worker as a run has."""
    from hybrid_rl.rollout.reward import Scorer

    scorer = Scorer(config.reward, 1, 10)
    scorer.check()
    ranks.all_gather(None)
    if ranks.main:
        print("at work", flush=True)
    try:
        while True:
            ranks.all_gather(ranks.rank)
            time.sleep(0.01)
    finally:
        scorer.close()


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
    from hybrid_rl.launch import after_rank_0

    ranks.all_gather(None)
    after_rank_0()
    print("no such model", flush=True)
    return 1


def ends_late(config, ranks) -> int:
    ranks.all_gather(None)
    if ranks.main:
        time.sleep(0.5)
        print("late", flush=True)
    return 0
