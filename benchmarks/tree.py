"""CPU time of a training step with tree batches against prefix-merged rows.

    OMP_NUM_THREADS=1 python benchmarks/tree.py [--case NAME ...] [--pairs N] [--out FILE]

Both sides get the same rows: every chain of an agent already merged into one row, its branches separate
(`--tree-batches off`), or common prefixes computed once (`--tree-batches auto`, the default). The two run
alternately; given is the median of the ratios of CPU seconds, for both ways of packing: the default
`--micro-batch-size 1`, and a token budget. The traces have the proportions of a session of Claude Code (a
system prompt with tools of 24,000 tokens, a window of 64,000 that is compacted once, two sub-agents with a
prompt of their own), scaled down by 48. The model is random: 6 layers of width 256 and a small vocabulary.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slime.backends.torch.trainer import TorchTrainer
from slime.backends.update import train_on_rollouts
from slime.config.sections import ModelConfig
from slime.config.training_sections import AlgorithmConfig, TrainConfig
from slime.train.batch import TrainSample
from tests.tiny import tiny_model_dir

SYSTEM, SUB_SYSTEM, TASK, WINDOW, SUMMARY, ANSWER, RESULT = 500, 100, 20, 1340, 40, 12, 28
VOCABULARY = 2048


@dataclass
class Batch:
    """Rows of a batch as they come, and the words they are made of."""

    rng: random.Random
    samples: list[TrainSample] = field(default_factory=list)

    def words(self, count):
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def add(self, rollout, group, prompt, turns):
        """One row: `turns` are (trained tokens, tokens of the environment behind them)."""
        mask = [m for answer, result in turns for m in [1] * len(answer) + [0] * len(result)]
        tokens = [*prompt, *itertools.chain.from_iterable(a + r for a, r in turns)]
        self.samples.append(
            TrainSample(
                index=len(self.samples),
                rollout_id=rollout,
                group_index=group,
                tokens=tuple(tokens),
                response_length=len(mask),
                loss_mask=tuple(mask),
                rollout_log_probs=None,
                reward=float(rollout % 2),
            )
        )

    def turns(self, tokens):
        each = ANSWER + RESULT
        return [(self.words(ANSWER), self.words(RESULT)) for _ in range(max(tokens // each, 1))]


def agents(rng, *, groups=1, size=4, compaction=True, sub_agents=2):
    """Sessions of a coding agent: a main chain, and beside it what compaction and sub-agents make."""
    batch = Batch(rng)
    system, sub_system = batch.words(SYSTEM), batch.words(SUB_SYSTEM)
    for group in range(groups):
        task = system + batch.words(TASK)
        for rollout in range(group * size, (group + 1) * size):
            main = batch.turns(WINDOW - len(task))
            batch.add(rollout, group, task, main)
            if compaction:
                held = [*task, *itertools.chain.from_iterable(a + r for a, r in main[:-1])]
                summary = batch.words(SUMMARY)
                batch.add(rollout, group, held + batch.words(TASK), [(summary, [])])
                batch.add(rollout, group, task + summary, batch.turns(WINDOW // 4))
            for _ in range(sub_agents):
                batch.add(rollout, group, sub_system + batch.words(TASK), batch.turns(WINDOW // 5))
    return batch.samples


def linear(rng, *, rollouts=6, head=0):
    """Sessions of one chain each and prompts that share only `head` tokens."""
    batch = Batch(rng)
    begin = batch.words(head)
    for rollout in range(rollouts):
        prompt = begin + batch.words(200 + rollout)
        batch.add(rollout, rollout // 2, prompt, batch.turns(600 + 100 * rollout))
    return batch.samples


def grpo(rng, *, groups=2, size=8, length=400, share=0.5):
    """Single-turn groups whose prompt is `share` of the row."""
    batch = Batch(rng)
    for group in range(groups):
        prompt = batch.words(int(length * share))
        for rollout in range(group * size, (group + 1) * size):
            batch.add(rollout, group, prompt, [(batch.words(length - len(prompt)), [])])
    return batch.samples


CASES = {
    "coding agent, one group of 4": (agents, {}, 1.8),
    "coding agent, two groups of 2": (agents, {"groups": 2, "size": 2}, 1.8),
    "coding agent, only compaction": (agents, {"sub_agents": 0}, 1.8),
    "groups of 8, prompt half the length": (grpo, {}, 1.3),
    "groups of 8, prompt a tenth": (grpo, {"share": 0.1}, None),
    "groups of 8, prompt a twentieth": (grpo, {"share": 0.05}, None),
    "linear, nothing in common": (linear, {}, 0.97),
    "linear, 16 tokens in common": (linear, {"head": 16}, 0.97),
    "linear, 100 tokens in common": (linear, {"head": 100}, 0.97),
}
"""Name -> (maker of the batch, its settings, the least ratio that we hold ourselves to)."""
PACKINGS = {
    "micro-batch-size 1": {},
    "max-tokens-per-gpu 8192": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 8192},
}


def trainer_of(folder, trees, packing):
    """A trainer on one thread; `lr` 0 keeps the two sides' weights the same."""
    return TorchTrainer(
        ModelConfig(hf_checkpoint=str(folder)),
        AlgorithmConfig(),
        TrainConfig(train_num_threads=1, train_precision="float32", lr=0.0, tree_batches=trees, **packing),
        temperature=1.0,
        total_steps=1,
    )


def step_cost(trainer, samples):
    """CPU seconds of a step, and the tokens that it computed."""
    started = time.process_time()
    update = train_on_rollouts(trainer, samples, algorithm=AlgorithmConfig(), rollouts_per_step=len(samples))
    return time.process_time() - started, update.steps[0]["computed_tokens"]


def compare(folder, samples, packing, pairs, trees="auto"):
    """Medians over `pairs` runs of both sides, in turns."""
    sides = [trainer_of(folder, setting, packing) for setting in ("off", trees)]
    runs = [[step_cost(side, samples) for side in sides] for _ in range(pairs + 1)][1:]
    return {
        "rows_cpu_s": statistics.median(rows[0] for rows, _ in runs),
        "tree_cpu_s": statistics.median(tree[0] for _, tree in runs),
        "ratio": statistics.median(rows[0] / tree[0] for rows, tree in runs),
        "tokens_ratio": runs[0][0][1] / runs[0][1][1],
    }


def main():
    """Entry of the script; the exit status is 1 where a ratio is below what we hold ourselves to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--trees", default="auto", choices=["auto", "on"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, short = {}, []
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "head_dim": 64}
        model = tiny_model_dir(
            Path(folder) / "model", vocab_size=VOCABULARY, max_position_embeddings=4096, **shape
        )
        print(f"{'':38}{'':25}{'rows':>8}{'tree':>8}{'ratio':>7}{'tokens':>8}")
        for name, (packing, values) in itertools.product(options.case, PACKINGS.items()):
            make, settings, least = CASES[name]
            samples = make(random.Random(0), **settings)
            result = compare(model, samples, values, options.pairs, options.trees)
            found[f"{name}, {packing}"] = result
            print(
                f"{name:38}{packing:25}{result['rows_cpu_s']:7.2f}s{result['tree_cpu_s']:7.2f}s"
                f"{result['ratio']:7.2f}{result['tokens_ratio']:8.2f}",
                flush=True,
            )
            if least is not None and result["ratio"] < least:
                short.append(f"{name}, {packing}: {result['ratio']:.2f} is below {least}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    print("\n".join(short))
    raise SystemExit(1 if short else 0)


if __name__ == "__main__":
    main()
