"""Decode and prefill speed of the embedded engine beside `transformers` generate, on one model folder.

    python benchmarks/engine.py --model DIR [--quick] [--batches N ...] [--new-tokens N] [--out FILE]

Both sides get the same random prompts, sample at temperature 1 and never stop early; the engine returns a
log-prob a token too. decode = tokens of a run of N new tokens less those of a run of one, by the difference
of their times. CPU seconds count all threads of this process; run on an idle machine for the wall clock.
"""

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from slime.config.sections import EngineConfig
from slime.serving.embedded.engine import Engine
from slime.serving.embedded.process import TUNING
from slime.serving.embedded.request import Request, SamplingParams

PROMPT_TOKENS = 128
TURNS, TURN_TOKENS, ANSWER_TOKENS = 10, 64, 16


@dataclass
class Cost:
    """CPU seconds of the process and wall seconds."""

    cpu: float
    wall: float

    def __sub__(self, other):
        return Cost(self.cpu - other.cpu, self.wall - other.wall)


def timed(function):
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


class Ours:
    """The embedded engine."""

    name = "slime"

    def __init__(self, folder, threads):
        self.engine = Engine(folder, EngineConfig(num_threads=threads, context_length=2048))
        self.engine.start()

    def run(self, prompts, new_tokens):
        self.engine.flush_cache()
        return timed(lambda: self.generate(prompts, new_tokens))

    def generate(self, prompts, new_tokens):
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, sampling_seed=0)
        left, results = threading.Semaphore(0), {}

        def listener(update):
            results[update.rid] = update
            left.release()

        for i, prompt in enumerate(prompts):
            request = Request(
                rid=str(i), input_ids=prompt, params=params, return_logprob=True, want_text=False
            )
            self.engine.submit(request, listener)
        for _ in prompts:
            left.acquire()
        assert all(len(update.output_ids) == new_tokens for update in results.values())
        return [results[str(i)] for i in range(len(prompts))]


class Transformers:
    """`model.generate` with its own static batch and key-value cache."""

    name = "transformers"

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def run(self, prompts, new_tokens):
        ids = torch.tensor(prompts)

        def generate():
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    pad_token_id=0,
                )

        return timed(generate)


def random_prompts(count, vocab, seed):
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def speed(side, batch, vocab, new_tokens, repeats):
    """Tokens per CPU second and per wall second, the best of `repeats`."""
    prompts = [random_prompts(batch, vocab, seed) for seed in range(repeats)]
    short = min((side.run(p, 1) for p in prompts), key=lambda cost: cost.cpu)
    long = min((side.run(p, new_tokens) for p in prompts), key=lambda cost: cost.cpu)
    decode, decoded = long - short, batch * (new_tokens - 1)
    return {
        "prefill_tokens_per_cpu_s": batch * PROMPT_TOKENS / short.cpu,
        "prefill_tokens_per_s": batch * PROMPT_TOKENS / short.wall,
        "decode_tokens_per_cpu_s": decoded / decode.cpu,
        "decode_tokens_per_s": decoded / decode.wall,
        "end_to_end_tokens_per_cpu_s": batch * new_tokens / long.cpu,
        "end_to_end_tokens_per_s": batch * new_tokens / long.wall,
    }


def matmul_rate():
    """GFLOP/s per CPU second of a float32 product with 1024 rows."""
    x, weight = torch.randn(1024, 1024), torch.randn(4096, 1024)
    torch.nn.functional.linear(x, weight)
    costs = [timed(lambda: torch.nn.functional.linear(x, weight)) for _ in range(8)]
    return 2 * 1024 * 1024 * 4096 / min(cost.cpu for cost in costs) / 1e9


def read_bandwidth():
    """GB/s per CPU second of summing a tensor that fits no cache."""
    memory = torch.ones(2**27)
    costs = [timed(memory.sum) for _ in range(4)]
    return memory.nbytes / min(cost.cpu for cost in costs) / 1e9


def shares(engine, row, batch, new_tokens, limits):
    """Share of the matmul rate and of the bandwidth that decoding reaches."""
    weights = [m.weight for m in engine._runner.model.modules() if isinstance(m, torch.nn.Linear)]
    parameters = sum(weight.numel() for weight in weights)
    context = PROMPT_TOKENS + new_tokens / 2
    cache = context * engine._scheduler._shape.bytes_per_token
    per_token = sum(weight.nbytes for weight in weights) / batch + cache
    rate = row["decode_tokens_per_cpu_s"]
    return {
        "decode_share_of_matmul_rate": 2 * parameters * rate / 1e9 / limits["matmul_gflop_per_cpu_s"],
        "decode_share_of_bandwidth": per_token * rate / 1e9 / limits["read_gb_per_cpu_s"],
        "prefill_share_of_matmul_rate": 2
        * (parameters - engine._runner.model.get_output_embeddings().weight.numel())
        * row["prefill_tokens_per_cpu_s"]
        / 1e9
        / limits["matmul_gflop_per_cpu_s"],
    }


def conversation(ours, vocab, repeats):
    """CPU seconds of each turn: TURN_TOKENS new prompt tokens after the history, ANSWER_TOKENS sampled."""
    turns = [[] for _ in range(TURNS)]
    for seed in range(repeats):
        ours.engine.flush_cache()
        rng, history = random.Random(seed), []
        for turn in turns:
            history += [rng.randrange(3, vocab) for _ in range(TURN_TOKENS)]
            answers = []
            cost = timed(lambda h=history, a=answers: a.extend(ours.generate([h], ANSWER_TOKENS)))
            history += answers[0].output_ids
            turn.append(cost.cpu)
    medians = [statistics.median(turn) for turn in turns]
    return {
        "turn_cpu_s": medians,
        "last_over_first": medians[-1] / medians[0],
        "cached": answers[0].cached_tokens,
    }


def line(name, batch, row, extra):
    """One row of the table."""
    parts = [f"{name:13} B={batch:<3}"]
    for phase in ("decode", "prefill"):
        parts.append(f"{phase} {row[f'{phase}_tokens_per_cpu_s']:7.0f} tok/CPU-s")
        parts.append(f"{row[f'{phase}_tokens_per_s']:7.0f} tok/s")
    parts += [f"{key.replace('_', ' ')} {value:.0%}" for key, value in extra.items()]
    return "  ".join(parts)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes, 16 new tokens, one repeat")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches, new_tokens, repeats = args.batches, args.new_tokens, args.repeats
    if args.quick:
        batches, new_tokens, repeats = [1, 64], 16, 1
    ours, theirs = Ours(args.model, args.threads), Transformers(args.model)
    vocab = ours.engine.vocab_size
    limits = {"matmul_gflop_per_cpu_s": matmul_rate(), "read_gb_per_cpu_s": read_bandwidth()}
    result = {"model": args.model, "threads": args.threads, "new_tokens": new_tokens} | limits | {"rows": []}
    print(", ".join(f"{name} {value:.1f}" for name, value in limits.items()))
    for side in (ours, theirs):
        side.run(random_prompts(2, vocab, 99), 3)
    for batch in batches:
        for side in (theirs, ours):
            row = speed(side, batch, vocab, new_tokens, repeats)
            extra = shares(ours.engine, row, batch, new_tokens, limits) if side is ours else {}
            result["rows"].append({"engine": side.name, "batch": batch} | row | extra)
            print(line(side.name, batch, row, extra), flush=True)
    result["conversation"] = conversation(ours, vocab, repeats)
    result["stats"] = asdict(ours.engine.stats)
    print(
        f"turn {TURNS} of a conversation costs {result['conversation']['last_over_first']:.2f} times turn 1"
    )
    ours.engine.shutdown()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    if TUNING.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | TUNING)
    main()
