"""`python -m hybrid_rl.report <run folder>`: build report.html and samples.md again from the files of the folder.

With --with <another run's folder> the report ends with a comparison of both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybrid_rl.report.page import write_report


def main() -> None:
    """Build the report and print its path."""
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_rl.report", description="Build report.html and samples.md of a run."
    )
    parser.add_argument("run_dir", type=Path, help="the folder of a run, finished or not")
    parser.add_argument("--with", type=Path, dest="other", metavar="OTHER", help="the folder of a run to compare with")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.run_dir, other=arguments.other))
    except OSError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
