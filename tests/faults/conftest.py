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
        folder = self.factory.mktemp(f"whole_{ranks}")
        run(folder, ranks=ranks)
        self[ranks] = folder
        return folder


@pytest.fixture(scope="session")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    return Wholes(tmp_path_factory)
