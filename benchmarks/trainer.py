"""Speed and memory of the torch trainer on one model folder.

    python benchmarks/trainer.py --model DIR [--quick] [--threads N] [--precision bfloat16] [--out FILE]

Speed: whole optimizer steps (forward, backward, AdamW), as a share of the rate that `F.linear`,
forward and backward, reaches just before and after at the shapes of the model. Counted are the products of
weight matrices with the tokens that must be computed (6 * weights * tokens), nothing else. Memory: peak RSS
of a 4096-token micro-batch of a shallow model with the folder's vocabulary, each way of the loss in its own
process. CPU seconds count all threads.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from slime.backends.torch.trainer import TorchTrainer
from slime.backends.update import train_on_rollouts
from slime.config.sections import ModelConfig
from slime.config.training_sections import AlgorithmConfig, TrainConfig
from slime.serving.embedded.process import TUNING
from slime.train.batch import TrainSample

MEMORY_WAYS = ("fused", "one_chunk", "autograd")
MEMORY_TOKENS = 4096


def grpo_batch(vocabulary, groups=8, size=8, prompt=35, common=20):
    """Groups of short answers to prompts that begin with the same template."""
    rng = random.Random(0)
    head = [rng.randrange(vocabulary) for _ in range(common)]
    samples = []
    for index in range(groups * size):
        if index % size == 0:
            question = [rng.randrange(vocabulary) for _ in range(prompt - common)]
        answer = [rng.randrange(vocabulary) for _ in range(rng.randint(4, 16))]
        samples.append(sample(index, index // size, head + question, answer, reward=float(index % 2)))
    return samples


def long_batch(vocabulary, lengths):
    """Unrelated sequences, all but the first tenth of each trained."""
    rng = random.Random(1)
    rows = [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]
    return [
        sample(i, 0, row[: len(row) // 10], row[len(row) // 10 :], reward=float(i % 2))
        for i, row in enumerate(rows)
    ]


def sample(index, group, prompt, answer, reward):
    return TrainSample(
        index=index,
        rollout_id=index,
        group_index=group,
        tokens=tuple(prompt + answer),
        response_length=len(answer),
        loss_mask=(1,) * len(answer),
        rollout_log_probs=None,
        reward=reward,
    )


def make_trainer(folder, threads, *, share=True, budget=4096, chunk=-1, precision="float32"):
    return TorchTrainer(
        ModelConfig(hf_checkpoint=str(folder)),
        AlgorithmConfig(),
        TrainConfig(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=budget,
            train_num_threads=threads,
            train_precision=precision,
            log_probs_chunk_size=chunk,
            tree_batches="auto" if share else "off",
        ),
        temperature=1.0,
        total_steps=100,
    )


def matmul_rate(trainer, tokens, seconds=1.0):
    """FLOP per CPU second and per wall second of the model's own matrices, forward and backward."""
    dtype = getattr(torch, trainer.precision)
    named = [(name, p.detach().to(dtype)) for name, p in trainer.named_parameters()]
    matrices = [p for name, p in named if p.dim() == 2 and "layers" in name]
    inputs = {k: torch.randn(tokens, k).to(dtype) for k in {m.shape[1] for m in matrices}}
    outputs = {n: torch.randn(tokens, n).to(dtype) for n in {m.shape[0] for m in matrices}}
    flops, cpu, wall = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < seconds:
        for matrix in matrices:
            rows, columns = matrix.shape
            torch.nn.functional.linear(inputs[columns], matrix)
            outputs[rows] @ matrix
            outputs[rows].t() @ inputs[columns]
            flops += 6 * tokens * rows * columns
    return flops / (time.process_time() - cpu), flops / (time.perf_counter() - wall)


def needed_flops(trainer, metrics, samples):
    """6 FLOP for each weight that a token must meet; the output layer meets distinct predictions only."""
    body = sum(p.numel() for name, p in trainer.named_parameters() if p.dim() == 2 and "layers" in name)
    output = trainer._model.head.weight.numel()
    contexts = {s.tokens[:end] for s in samples for end in range(s.prompt_length, len(s.tokens))}
    return 6 * (body * metrics["computed_tokens"] + output * len(contexts))


def measure_speed(trainer, samples, repeats):
    """The best of `repeats` steps behind two to warm up."""
    rows = sum(len(s.tokens) for s in samples)
    best = None
    for attempt in range(repeats + 2):
        before = matmul_rate(trainer, tokens=512)
        cpu, wall = time.process_time(), time.perf_counter()
        update = train_on_rollouts(
            trainer, samples, algorithm=AlgorithmConfig(), rollouts_per_step=len(samples)
        )
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        after = matmul_rate(trainer, tokens=512)
        rate = max(before[0], after[0])
        metrics = update.steps[0]
        flops = needed_flops(trainer, metrics, samples)
        found = {
            "row_tokens": rows,
            "computed_tokens": metrics["computed_tokens"],
            "trained_tokens": metrics["tokens"],
            "step_cpu_s": cpu,
            "step_s": wall,
            "row_tokens_per_cpu_s": rows / cpu,
            "row_tokens_per_s": rows / wall,
            "gflops_per_cpu_s": flops / cpu / 1e9,
            "matmul_gflops_per_cpu_s": rate / 1e9,
            "share_of_matmul_rate": flops / cpu / rate,
        }
        if attempt >= 2 and (best is None or found["step_cpu_s"] < best["step_cpu_s"]):
            best = found
    return best


def speed(folder, threads, quick, precision):
    trainer = make_trainer(folder, threads, precision=precision)
    vocabulary = trainer._model.head.weight.shape[0]
    repeats = 1 if quick else 4
    grpo = grpo_batch(vocabulary)
    lengths = [256, 128, 64, 64] if quick else [1024, 896, 640, 512, 384, 256, 256, 128]
    found = {"grpo_64_rollouts": measure_speed(trainer, grpo, repeats)}
    found["long_sequences"] = measure_speed(trainer, long_batch(vocabulary, lengths), repeats)
    if not quick:
        separate = make_trainer(folder, threads, share=False, precision=precision)
        found["grpo_64_rollouts_without_sharing"] = measure_speed(separate, grpo, repeats)
    return found


def shallow_model(folder, source):
    """Two random layers under the vocabulary of `source`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers = 2
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def memory_child(folder, way):
    """Forward and backward of one micro-batch; prints MiB of RSS before and at the peak."""
    trainer = make_trainer(folder, threads=1, chunk=MEMORY_TOKENS if way == "one_chunk" else -1)
    samples = long_batch(trainer._model.head.weight.shape[0], [MEMORY_TOKENS // 4] * 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if way == "autograd":
        module = trainer._model.module
        module.set_attn_implementation("sdpa")
        ids = torch.tensor([s.tokens for s in samples])
        log_p = module(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        log_p[:, :-1].gather(2, ids[:, 1:, None]).sum().backward()
    else:
        train_on_rollouts(trainer, samples, algorithm=AlgorithmConfig(), rollouts_per_step=4)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"before_mib": before, "peak_mib": peak}))


def memory(source):
    with tempfile.TemporaryDirectory() as folder:
        shallow_model(folder, source)
        found = {}
        for way in MEMORY_WAYS:
            command = [sys.executable, __file__, "--model", folder, "--memory-child", way]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-child", choices=MEMORY_WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        memory_child(options.model, options.memory_child)
        return
    if any(os.environ.get(name) != value for name, value in TUNING.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], dict(os.environ) | TUNING)
    report = {"threads": options.threads, "precision": options.precision, "memory": memory(options.model)}
    report["speed"] = speed(options.model, options.threads, options.quick, options.precision)
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
