"""`slime replay RUN`: decide every batch of a run again from its event log, and compare.

Exit code 0 if all batches are the same. Needs neither torch nor an engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.rollout import events
from slime.rollout.replay import replay


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="slime replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the --run-dir of a run, or its events.jsonl")
    options = parser.parse_args(argv)
    log = options.run / events.NAME if options.run.is_dir() else options.run
    closed = replay(events.read_events(log))
    for batch in closed:
        verdict = "same" if batch.same else f"differs: recorded {batch.recorded}, replayed {batch.replayed}"
        print(f"step {batch.step}: {len(batch.recorded)} groups, {verdict}")
    different = sum(not batch.same for batch in closed)
    print(f"{len(closed)} batches, {different} different")
    return 1 if different else 0
