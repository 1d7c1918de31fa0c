"""Compare runs: python -m hybrid_rl.compare FOLDER [FOLDER …] prints a table and writes one self-contained HTML page.

A folder is a run's, a sweep's, or a recipe's. Runs whose settings are equal but for the seed form a group; every
group is compared with the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybrid_rl.report.comparison import compare, find_runs, write_comparison
from hybrid_rl.report.console import visible


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison, write its page, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_rl.compare", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="of a run, a sweep or a recipe")
    parser.add_argument(
        "--output", type=Path, help="the page to write; by default comparison.html in the only folder named, else here"
    )
    given = parser.parse_args(arguments)
    page = given.output or (given.folders[0] if len(given.folders) == 1 else Path()) / "comparison.html"
    try:
        comparison = compare(find_runs(given.folders))
        write_comparison(comparison, page)
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 500  # a file or a pipe wraps nothing
    header, rows = comparison.table()
    table = Table(box=None, pad_edge=False)
    for position, name in enumerate(header):
        table.add_column(name, overflow="fold", justify="right" if position else "left")
    for row in rows:
        table.add_row(*(visible(cell).replace("[", "\\[") for cell in row))
    console.print(table)
    unfinished = sum(row[-1] != "finished" for row in comparison.runs())
    if unfinished:
        console.print(f"{unfinished} of {len(comparison.runs())} runs are not finished", markup=False)
    console.print(
        f"mean ± half the 95 % interval over seeds; p: paired t test over common seeds; page: {page}", markup=False
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
