"""Runs that nothing ended, to compare with."""

from pathlib import Path

import pytest

from tests.faults.runs import run


class Wholes(dict[int, Path]):
    """By number of ranks; made when first asked for."""

    def __init__(self, factory: pytest.TempPathFactory):
        super().__init__()
        self.factory = factory

    def __missing__(self, ranks: int) -> Path:
        self[ranks] = self.factory.mktemp(f"whole_{ranks}")
        run(self[ranks], ranks=ranks)
        return self[ranks]


@pytest.fixture(scope="session")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    return Wholes(tmp_path_factory)
