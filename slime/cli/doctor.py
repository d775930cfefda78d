"""`slime doctor RUN`: what every process of a run that goes on is doing, and since when.

Asks the processes through the run folder; `kill -USR1` on `slime train` prints the same there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.observability.doctor import ANSWER_SECONDS, examine


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="slime doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the --run-dir of a run")
    parser.add_argument("--seconds", type=float, default=ANSWER_SECONDS, help="wait for answers [10]")
    options = parser.parse_args(argv)
    print(examine(options.run, options.seconds))
    return 0
