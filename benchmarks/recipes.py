"""Each training recipe on the quickstart's additions: held-out accuracy over the steps, table and picture.

    python benchmarks/recipes.py [--only ppo gspo] [--picture docs/en/recipes.svg]

Every recipe is the quickstart's configuration and the flags that are printed with it; supervised fine-tuning
is `examples/sft` with an engine to evaluate. Needs the converted model (`make quickstart` makes it).
About two minutes each on two cores. (In the only step of its rollouts every ratio is 1, and GRPO, GSPO and
CISPO are one; so the latter two take two steps.)
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from processes import measure

from slime.observability.report import evaluation_scores
from slime.observability.trackers import read_metrics

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = "--config examples/quickstart/config.yaml"
SFT_EVALUATION = {
    "eval": {
        "datasets": [
            {
                "name": "held_out",
                "path": "data/quickstart/held_out.jsonl",
                "input_key": "input",
                "label_key": "label",
                "apply_chat_template": True,
                "n_samples_per_eval_prompt": 4,
                "max_response_len": 16,
                "custom_rm_path": "examples.quickstart.reward.just_the_number",
            }
        ]
    }
}
RECIPES = {
    "GRPO": QUICKSTART,
    "RLOO": f"{QUICKSTART} --advantage-estimator rloo",
    "GSPO": f"{QUICKSTART} --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 "
    "--num-steps-per-rollout 2",
    "CISPO": f"{QUICKSTART} --advantage-estimator cispo --num-steps-per-rollout 2",
    "REINFORCE++": f"{QUICKSTART} --advantage-estimator reinforce_plus_plus --normalize-advantages",
    "REINFORCE++ baseline": f"{QUICKSTART} --advantage-estimator reinforce_plus_plus_baseline "
    "--normalize-advantages",
    "PPO": f"{QUICKSTART} --advantage-estimator ppo --normalize-advantages --critic-lr 5e-5 "
    "--num-critic-only-steps 1",
    "SFT": "--eval-function-path slime.rollout.sglang_rollout.generate_rollout --eval-interval 4 "
    "--rollout-max-response-len 16",
}


def run(name: str, work: Path, threads: int | None) -> dict[str, object]:
    """One recipe in a fresh folder; `threads` are those of engine and trainer each."""
    folder = work / name.lower().replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    flags = RECIPES[name].split()
    if name == "SFT":
        config, evaluation = folder / "config.yaml", folder / "evaluation.yaml"
        given = yaml.safe_load(Path("examples/sft/config.yaml").read_text())
        config.write_text(yaml.safe_dump(given | {"debug-train-only": False}))
        evaluation.write_text(yaml.safe_dump(SFT_EVALUATION))
        flags += ["--config", str(config), "--eval-config", str(evaluation)]
    if threads:
        flags += ["--train-num-threads", str(threads), "--engine-num-threads", str(threads)]
    command = [sys.executable, "-m", "slime.cli", "train", *flags, "--run-dir", str(folder)]
    usage = measure(command, folder / "log.txt", dict(os.environ) | {"HF_HUB_OFFLINE": "1"})
    if usage.returncode:
        raise SystemExit(f"{name} failed; see {folder / 'log.txt'}")
    points = evaluation_scores(read_metrics(folder / "metrics.jsonl"))["held_out"]
    return {"flags": RECIPES[name], "held_out": points, "wall_s": usage.wall_s, "cpu_s": usage.cpu_s}


def table(results: dict[str, dict]) -> str:
    """The results in Markdown."""
    lines = ["| Recipe | Flags | Held-out accuracy (after steps) | CPU s |", "|---|---|---|---|"]
    for name, result in results.items():
        points = ", ".join(f"{score:.2f} ({step})" for step, score in result["held_out"])
        lines.append(f"| {name} | `{result['flags']}` | {points} | {result['cpu_s']:.0f} |")
    return "\n".join(lines)


def draw(results: dict[str, dict], path: Path) -> None:
    """The curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, result in results.items():
        axes.plot(*zip(*result["held_out"], strict=True), marker="o", markersize=3, label=name)
    axes.set_xlabel("rollout steps")
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "recipes")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--threads", type=int, help="of engine and trainer each; for machines that do more")
    options = parser.parse_args()
    os.chdir(ROOT)
    for data in ("quickstart", "sft"):
        make_data = [sys.executable, "-m", f"examples.{data}.make_data", f"data/{data}"]
        subprocess.run(make_data, check=True)
    kept = options.work / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for name in options.only:
        results[name] = run(name, options.work, options.threads)
        print(f"{name}: {results[name]['held_out']}", flush=True)
        kept.write_text(json.dumps(results, indent=1))
    results = {name: results[name] for name in RECIPES if name in results}
    print(table(results))
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
