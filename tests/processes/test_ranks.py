"""How ranks agree: shares, gathering, what only rank 0 knows, and errors that reach everyone."""

import pytest
import torch

from hybrid_rl.processes.ranks import Ranks
from tests.ranks import on_ranks


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 128])
def test_shares_are_contiguous_complete_and_even(world, count):
    shares = [Ranks(r, world).share(count) for r in range(world)]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def everything(ranks: Ranks) -> dict:
    return {
        "gathered": ranks.all_gather({"rank": ranks.rank}),
        "main": ranks.from_main(lambda: f"from {ranks.rank}"),
        "sum": ranks.sum(torch.tensor([1.0, ranks.rank])).tolist(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_learns_the_same(world):
    expected = {
        "gathered": [{"rank": r} for r in range(world)],
        "main": "from 0",
        "sum": [float(world), float(sum(range(world)))],
    }
    assert on_ranks(world, everything) == [expected] * world
    assert everything(Ranks()) == {
        "gathered": [{"rank": 0}],
        "main": "from 0",
        "sum": [1.0, 0.0],
    }  # no process group at all


def failing_main(ranks: Ranks) -> str:
    try:
        ranks.from_main(lambda: 1 / 0)
    except ZeroDivisionError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing_third(ranks: Ranks) -> str:
    try:
        ranks.agree(ValueError(f"rank {ranks.rank} cannot") if ranks.rank == 2 else None)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_an_error_of_one_rank_is_raised_on_all():
    assert on_ranks(2, failing_main) == ["ZeroDivisionError: division by zero"] * 2
    assert on_ranks(3, failing_third) == ["rank 2 cannot"] * 3


def test_the_first_rank_of_a_team_has_its_whole_share():
    assert [list(Ranks(r, 6).share(7, team=2)) for r in range(6)] == [[0, 1], [], [2, 3], [], [4, 5, 6], []]
    assert [list(Ranks(r, 4).share(3, team=4)) for r in range(4)] == [[0, 1, 2], [], [], []]


def in_teams(ranks: Ranks) -> tuple:
    team = ranks.team(2)
    said = team.all_gather(ranks.rank)
    heard = team.from_main(lambda: f"from {ranks.rank}")
    try:
        team.on_all(lambda: 1 // (3 - ranks.rank))  # of the last rank alone
        failed = ""
    except ZeroDivisionError as error:
        failed = str(error)
    return team.rank, team.world, said, heard, failed, ranks.all_gather(ranks.rank)


def test_teams_agree_among_themselves():
    zero, everyone = "integer division or modulo by zero", [0, 1, 2, 3]
    assert on_ranks(4, in_teams) == [
        (0, 2, [0, 1], "from 0", "", everyone),
        (1, 2, [0, 1], "from 0", "", everyone),
        (0, 2, [2, 3], "from 2", zero, everyone),
        (1, 2, [2, 3], "from 2", zero, everyone),
    ]
