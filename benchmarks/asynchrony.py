"""The quickstart beside prompts with long answers: synchronous against fully asynchronous training.

python benchmarks/asynchrony.py --seeds 1 2          # after `make quickstart` or with the model converted

One prompt in eight asks to write a word many times, up to 320 tokens; the others are the quickstart's sums.
So answers are heavy-tailed, and a synchronous step waits for the longest. Both runs train on the same data
with the same flags but the rollout function and the decoupled loss; the asynchronous one may take half as
many steps more. Told are the accuracy on held-out sums over wall time since the first evaluation, and when
each run reaches the synchronous one's last accuracy.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from processes import measure

from slime.observability.report import evaluation_scores
from slime.observability.trackers import read_metrics
from slime.utils.types import Sample

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("apple", "river", "stone", "cloud", "green", "seven")
ROLLOUT_FUNCTIONS = {
    "synchronous": [],
    "fully_async": [
        "--rollout-function-path",
        "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        *("--use-decoupled-loss", "--use-tis"),
    ],
}


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """The quickstart's for a sum; for a word, the share of the wanted repetitions."""
    from examples.quickstart.reward import is_just

    if "times" not in sample.metadata:
        return float(is_just(sample.response, sample.label))
    times = int(sample.metadata["times"])
    return min(sample.response.lower().split().count(str(sample.label)), times) / times


def write_long(path: Path, count: int = 64) -> None:
    """Prompts whose answers are long."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        word, times = rng.choice(WORDS), min(int(20 * rng.paretovariate(0.8)), 200)
        text = f"Write the word {word} {times} times, separated by spaces."
        messages = [{"role": "user", "content": text}]
        rows.append({"input": messages, "label": word, "metadata": {"times": times}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run in a fresh folder."""
    folder = options.work / f"{way}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl"):
        (folder / name).unlink(missing_ok=True)
    flags = ["--config", "examples/quickstart/config.yaml", "--run-dir", str(folder)]
    flags += ["--prompt-data", "data/quickstart/train.jsonl", "data/quickstart/long.jsonl"]
    flags += ["--prompt-data-weights", "0.875", "0.125", "--rollout-max-response-len", "320"]
    flags += ["--eval-max-response-len", "16", "--eval-interval", str(options.eval_interval)]
    steps = options.steps if way == "synchronous" else options.steps * 3 // 2
    flags += ["--custom-rm-path", "asynchrony.reward", "--num-rollout", str(steps)]
    flags += ["--rollout-seed", str(seed), *ROLLOUT_FUNCTIONS[way]]
    if way == "fully_async":
        flags += ["--max-staleness", str(options.max_staleness)]
    command = [sys.executable, "-m", "slime.cli", "train", *flags, *options.flags]
    env = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    }
    usage = measure(command, folder / "log.txt", env)
    if usage.returncode:
        raise SystemExit(f"{way}, seed {seed} failed; see {folder / 'log.txt'}")
    return {"way": way, "seed": seed, "wall_s": usage.wall_s, "cpu_s": usage.cpu_s, **curve(folder)}


def curve(folder: Path) -> dict[str, Any]:
    """Held-out accuracy by seconds since the first evaluation, and what the steps were like."""
    rows = read_metrics(folder / "metrics.jsonl")
    evaluations = [row for row in rows if "eval/held_out" in row]
    start = evaluations[0]["time"]
    steps = [row for row in rows if "train/loss" in row]
    return {
        "points": [(round(row["time"] - start, 1), row["eval/held_out"]) for row in evaluations],
        "scores": evaluation_scores(rows)["held_out"],
        "longest": max(row["rollout/response_len/max"] for row in steps),
        "median": sorted(row["rollout/response_len/median"] for row in steps)[len(steps) // 2],
        "oldest": max(row.get("rollout/oldest_token_age", 0) for row in steps),
    }


def reached(points: list[tuple[float, float]], score: float) -> float | None:
    """Seconds to the first evaluation with this score."""
    return next((seconds for seconds, found in points if found >= score), None)


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--eval-interval", type=int, default=4)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "asynchrony")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of both runs")
    options = parser.parse_args()
    os.chdir(ROOT)
    subprocess.run([sys.executable, "examples/quickstart/make_data.py", "data/quickstart"], check=True)
    write_long(ROOT / "data" / "quickstart" / "long.jsonl")
    results = []
    for seed in options.seeds:
        found = {way: run(way, seed, options) for way in ROLLOUT_FUNCTIONS}
        results += found.values()
        aim = found["synchronous"]["points"][-1][1]
        for way, result in found.items():
            when = reached(result["points"], aim)
            print(
                f"seed {seed}, {way}: {result['points'][-1][1]:.3f} after {result['points'][-1][0]:.0f} s, "
                f"{aim:.3f} reached after {when} s; {result['cpu_s']:.0f} CPU-s, answers of "
                f"{result['median']:.0f} (median) to {result['longest']:.0f} tokens, oldest token "
                f"{result['oldest']:.0f} updates old",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
