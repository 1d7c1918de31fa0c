"""`python -m hybrid_rl.report <run folder>`: build report.html and samples.md anew from what the folder holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybrid_rl.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_rl.report", description="Build a run's report.html and samples.md."
    )
    parser.add_argument("run_dir", type=Path, help="a run's folder; the run may still be going on")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.run_dir))
    except OSError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
