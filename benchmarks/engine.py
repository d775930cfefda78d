"""Decode and prefill speed of the embedded engine beside `transformers` generate, on one model folder.

    python benchmarks/engine.py --model DIR [--quick] [--batches N ...] [--new-tokens N] [--out FILE]

All sides get the same random prompts, sample at temperature 1 and never stop early. The engine returns a
log-prob a token too, as reinforcement learning needs; "+logprobs" is `transformers` with the same. decode =
tokens of a run of N new tokens less those of a run of one, by the difference of their times. The rows "mixed"
are one batch whose requests want 1 to N new tokens each, as rollouts do: all wanted tokens by the time of the
whole batch. Each engine runs in a process of its own, so that each has one OpenMP pool: `transformers` in the
environment as it is (with --tuned in ours, which asks for huge pages).
CPU seconds count all threads, also those that spin for the next operation; run on an idle machine for the
wall clock.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
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
        wanted = new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(prompts)
        left, results = threading.Semaphore(0), {}

        def listener(update):
            results[update.rid] = update
            left.release()

        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=wanted[i], ignore_eos=True, sampling_seed=0)
            request = Request(
                rid=str(i), input_ids=prompt, params=params, return_logprob=True, want_text=False
            )
            self.engine.submit(request, listener)
        for _ in prompts:
            left.acquire()
        assert [len(results[str(i)].output_ids) for i in range(len(prompts))] == wanted
        return [results[str(i)] for i in range(len(prompts))]


class Logprobs:
    """A logits processor that records the log-prob of each sampled token and keeps one step of logits."""

    def __init__(self):
        self.logprobs = []
        self.scores = None

    def __call__(self, ids, scores):
        self.record(ids)
        self.scores = scores
        return scores

    def record(self, ids):
        """Take the last token of `ids` as the one that was sampled from the last scores."""
        if self.scores is not None:
            chosen = self.scores.gather(1, ids[:, -1:])[:, 0]
            self.logprobs.append(chosen - self.scores.logsumexp(-1))


class Transformers:
    """`model.generate` with its own static batch and key-value cache."""

    def __init__(self, model, logprobs):
        self.model = model
        self.logprobs = logprobs
        self.name = "  +logprobs" if logprobs else "transformers"

    def run(self, prompts, new_tokens):
        ids, longest = torch.tensor(prompts), max(new_tokens) if isinstance(new_tokens, list) else new_tokens

        def generate():
            recorder = Logprobs()
            with torch.inference_mode():
                tokens = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=longest,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    pad_token_id=0,
                    logits_processor=[recorder] if self.logprobs else [],
                )
                recorder.record(tokens)
            if self.logprobs:
                assert torch.stack(recorder.logprobs).shape == (longest, len(prompts))

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


def mixed(side, batch, vocab, args):
    """Wanted tokens per second where each request wants another number of new tokens."""
    rng = random.Random(0)
    wanted = [rng.randint(1, args.new_tokens) for _ in range(batch)]
    cost = side.run(random_prompts(batch, vocab, 7), wanted)
    row = {"tokens_per_cpu_s": sum(wanted) / cost.cpu, "tokens_per_s": sum(wanted) / cost.wall}
    shown = f"{row['tokens_per_cpu_s']:7.0f} tok/CPU-s {row['tokens_per_s']:7.0f} tok/s"
    print(f"{side.name:13} B={batch:<3}  mixed  {shown}, prefill included", flush=True)
    return row


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


def measure_transformers(args):
    """The limits of the machine and the rows of `transformers`."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    limits = {"matmul_gflop_per_cpu_s": matmul_rate(), "read_gb_per_cpu_s": read_bandwidth()}
    print(", ".join(f"{name} {value:.1f}" for name, value in limits.items()), flush=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    vocab = model.config.vocab_size
    sides = [Transformers(model, logprobs) for logprobs in (False, True)]
    sides[0].run(random_prompts(2, vocab, 99), 3)
    rows = [row_of(side, batch, vocab, args) for batch in args.batches for side in sides]
    spread = {side.name.strip(): mixed(side, max(args.batches), vocab, args) for side in sides}
    return {"limits": limits, "rows": rows, "mixed": spread}


def measure_slime(args):
    """The rows of the engine, and a conversation with it."""
    limits = json.loads(args.limits.read_text())["limits"]
    side = Ours(args.model, args.threads)
    vocab = side.engine.vocab_size
    side.run(random_prompts(2, vocab, 99), 3)
    rows = [
        row_of(side, batch, vocab, args, lambda row, b: shares(side.engine, row, b, args.new_tokens, limits))
        for batch in args.batches
    ]
    spread = mixed(side, max(args.batches), vocab, args)
    turns = conversation(side, vocab, args.repeats)
    print(f"turn {TURNS} of a conversation costs {turns['last_over_first']:.2f} times turn 1")
    stats = asdict(side.engine.stats)
    side.engine.shutdown()
    return {"rows": rows, "mixed": spread, "conversation": turns, "stats": stats}


def row_of(side, batch, vocab, args, extra=lambda row, batch: {}):
    row = speed(side, batch, vocab, args.new_tokens, args.repeats)
    more = extra(row, batch)
    print(line(side.name, batch, row, more), flush=True)
    return {"engine": side.name.strip(), "batch": batch} | row | more


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
    parser.add_argument("--tuned", action="store_true", help="our environment for transformers too")
    parser.add_argument("--side", choices=["transformers", "slime"], help=argparse.SUPPRESS)
    parser.add_argument("--limits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.batches, args.new_tokens, args.repeats = [1, 64], 16, 1
    if args.side:
        found = (measure_slime if args.side == "slime" else measure_transformers)(args)
        args.out.write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "transformers", Path(folder) / "slime"
        for side, more in ((theirs, []), (ours, ["--limits", str(theirs)])):
            command = [sys.executable, *sys.argv, "--side", side.name, "--out", str(side), *more]
            tuned = args.tuned or side is ours
            subprocess.run(command, check=True, env=os.environ | (TUNING if tuned else {}))
        result = {"model": args.model, "threads": args.threads, "new_tokens": args.new_tokens}
        result |= {"transformers": json.loads(theirs.read_text()), "slime": json.loads(ours.read_text())}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
