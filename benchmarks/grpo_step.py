"""GRPO steps in TRL's GRPOTrainer and in slime: same model, prompts, lengths, rate and steps.

    pip install trl==1.16.0
    python benchmarks/grpo_step.py --model models/smollm2-135m-instruct

Each side runs as its own process, paired, with a short and a long run; the cost of a step is the difference
between the two divided by the steps between them, so start-up does not count. CPU seconds are those of the
whole process tree. TRL runs with its fastest settings on CPU that we found: one batch for all rollouts, no
gradient checkpointing, fused AdamW, no KL model, float32.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import yaml
from processes import Usage, measure

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, ROLLOUTS, RESPONSE, RATE = 8, 8, 16, 1e-5


def run_trl(options: argparse.Namespace) -> None:
    """TRL's trainer in this process; writes the reward of each step to `options.out`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT))
    from examples.quickstart.reward import is_just

    def reward(completions, label, **kwargs):
        texts = [completion[0]["content"] for completion in completions]
        return [float(is_just(text, wanted)) for text, wanted in zip(texts, label, strict=True)]

    rows = [json.loads(line) for line in (options.data / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["input"], "label": row["label"]} for row in rows])
    config = GRPOConfig(
        output_dir=str(options.out.parent / "trl"),
        per_device_train_batch_size=PROMPTS * ROLLOUTS,
        gradient_accumulation_steps=1,
        num_generations=ROLLOUTS,
        max_completion_length=RESPONSE,
        max_steps=options.steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(str(options.model), reward_funcs=reward, args=config, train_dataset=data)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    options.out.write_text(json.dumps(rewards))


def command_of(side: str, steps: int, seed: int, options: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of one run."""
    if side == "trl":
        words = [sys.executable, __file__, "--side", "trl", "--out", str(folder / "rewards.json")]
        words += ["--model", str(options.model), "--data", str(options.data)]
        return [*words, "--steps", str(steps), "--seed", str(seed)]
    flags = {
        "hf-checkpoint": str(options.model),
        "prompt-data": str(options.data / "train.jsonl"),
        "apply-chat-template": True,
        "label-key": "label",
        "rollout-shuffle": True,
        "num-rollout": steps,
        "rollout-batch-size": PROMPTS,
        "n-samples-per-prompt": ROLLOUTS,
        "rollout-max-response-len": RESPONSE,
        "custom-rm-path": "examples.quickstart.reward.just_the_number",
        "lr": RATE,
        "train-precision": "float32",
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": 4096,
        "seed": seed,
        "rollout-seed": seed,
        "run-dir": str(folder),
    }
    (folder / "flags.yaml").write_text(yaml.safe_dump(flags))
    return [sys.executable, "-m", "slime.cli", "train", "--config", str(folder / "flags.yaml")]


def rewards_of(side: str, folder: Path) -> list[float]:
    """Mean training reward of each step."""
    if side == "trl":
        return json.loads((folder / "rewards.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]


def run_side(side: str, steps: int, seed: int, options: argparse.Namespace) -> tuple[Usage, list[float]]:
    """One measured run in a fresh folder."""
    folder = options.work / f"{side}-{steps}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    usage = measure(command_of(side, steps, seed, options, folder), folder / "log.txt", env)
    if usage.returncode:
        raise SystemExit(f"{side} failed; see {folder / 'log.txt'}")
    return usage, rewards_of(side, folder)


def compare(options: argparse.Namespace) -> None:
    """Paired runs of both sides; prints the table."""
    result: dict[str, dict[str, object]] = {}
    for side in ("slime", "trl"):
        pairs = []
        for seed in range(options.pairs):
            short, _ = run_side(side, options.short, seed, options)
            long, rewards = run_side(side, options.steps, seed, options)
            between = options.steps - options.short
            pairs.append(
                {
                    "cpu_s_per_step": (long.cpu_s - short.cpu_s) / between,
                    "wall_s_per_step": (long.wall_s - short.wall_s) / between,
                    "whole_cpu_s": long.cpu_s,
                    "whole_wall_s": long.wall_s,
                    "peak_rss_gib": long.peak_rss_bytes / 2**30,
                    "rewards": rewards,
                }
            )
            print(side, f"seed {seed}", {k: v for k, v in pairs[-1].items() if k != "rewards"}, flush=True)
            print("  rewards", " ".join(f"{value:.3f}" for value in rewards), flush=True)
        result[side] = {"pairs": pairs}
    cost = {
        side: statistics.median(pair["cpu_s_per_step"] for pair in part["pairs"])
        for side, part in result.items()
    }
    print(
        f"CPU seconds a step: slime {cost['slime']:.1f}, trl {cost['trl']:.1f}: "
        f"{cost['trl'] / cost['slime']:.2f}x"
    )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("data/quickstart"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--short", type=int, default=2, help="steps of the short run")
    parser.add_argument("--pairs", type=int, default=1, help="seeds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/grpo_step"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=["trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "trl":
        run_trl(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
