"""The quickstart with several seeds: held-out accuracy before and after, and how long it takes.

python benchmarks/quickstart.py --seeds 1 2 3        # after `make quickstart` or with the model converted
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from processes import measure

from slime.observability.report import evaluation_scores
from slime.observability.trackers import read_metrics

ROOT = Path(__file__).resolve().parent.parent


def run(seed: int, work: Path) -> dict[str, object]:
    """One run in a fresh folder."""
    folder = work / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    flags = ["--config", "examples/quickstart/config.yaml", "--run-dir", str(folder)]
    command = [sys.executable, "-m", "slime.cli", "train", *flags, "--rollout-seed", str(seed)]
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    usage = measure(command, folder / "log.txt", env)
    if usage.returncode:
        raise SystemExit(f"seed {seed} failed; see {folder / 'log.txt'}")
    points = evaluation_scores(read_metrics(folder / "metrics.jsonl"))["held_out"]
    return {"seed": seed, "held_out": points, "wall_s": usage.wall_s, "cpu_s": usage.cpu_s}


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "quickstart-seeds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.chdir(ROOT)
    make_data = [sys.executable, "examples/quickstart/make_data.py", "data/quickstart"]
    subprocess.run(make_data, check=True)
    results = []
    for seed in options.seeds:
        results.append(run(seed, options.work))
        points = results[-1]["held_out"]
        print(
            f"seed {seed}: {points[0][1]:.3f} before, {points[-1][1]:.3f} after {points[-1][0]} steps, "
            f"{results[-1]['wall_s']:.0f} s, {results[-1]['cpu_s']:.0f} CPU-s",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
