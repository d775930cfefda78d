"""The example end to end without a model: a real agent, whose requests a policy answers that plays solutions.

    python -m examples.coding_agent_rl.run_scripted --agent codex --tokenizer FOLDER --out runs/scripted

Everything but the model is real: the rollout function, the hook, the adapter, sandboxes, the agent's program,
tests and rewards. Of each task's rollouts every other one repairs the bug; the others spoil the tests. The
samples are written as a dump from which `slime train --load-debug-rollout-data` takes a training step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from examples.coding_agent_rl.make_data import make
from examples.coding_agent_rl.scripted_policy import RepairPolicy
from slime.agent.harness import HARNESSES
from slime.rollout import dump
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.groups import flatten
from slime.rollout.sglang_rollout import generate_rollout
from slime.serving.scripted import start_scripted_server
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

CONTEXT = 131072


def roll(
    agent: str, tokenizer: Path, out: Path, *, tasks: int, samples: int, at_once: int
) -> tuple[list[Sample], int]:
    """One rollout step: its samples, which are also in ``<out>/rollouts/0.jsonl``, and the tokens sampled."""
    os.environ["SWE_AGENT"] = agent
    with start_scripted_server(RepairPolicy(), load_tokenizer(tokenizer), context_length=CONTEXT) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        args = SimpleNamespace(
            hf_checkpoint=str(tokenizer),
            prompt_data=str(make(out / "data")),
            rollout_batch_size=tasks,
            n_samples_per_prompt=samples,
            rollout_max_response_len=4096,
            rollout_max_context_len=CONTEXT,
            rollout_temperature=1.0,
            custom_generate_function_path="examples.coding_agent_rl.generate.generate",
            sglang_server_concurrency=at_once,
            sglang_router_ip=host,
            sglang_router_port=int(port),
            rollout_timeout=3600.0,
            max_failed_rollout_ratio=0.0,
            run_dir=str(out),
        )
        output = generate_rollout(args, 0, RolloutDataSource(args))
        sampled = server.engine.stats.decode_tokens
    found = list(flatten(output.samples))
    dump.save(str(out / "rollouts" / "{rollout_id}.jsonl"), 0, found)
    return found, sampled


def table(samples: Sequence[Sample], sampled: int) -> list[str]:
    """A line a sample, and what was trained of what was sampled."""
    lines = [f"{'task':14}{'rollout':>8}{'segment':>10}{'reward':>8}{'turns':>7}{'tokens':>8}{'trained':>9}"]
    for sample in samples:
        facts = sample.metadata
        reward = facts.get("abort_reason") or sample.reward
        trained = sum(sample.loss_mask or ())
        row = (facts.get("segment", "-"), reward, facts.get("turns", 0), len(sample.tokens), trained)
        name = facts["instance_id"]
        lines.append("{:14}{:>8}{:>10}{:>8}{:>7}{:>8}{:>9}".format(name, sample.rollout_id, *map(str, row)))
    trained = sum(sum(sample.loss_mask or ()) for sample in samples)
    return [*lines, f"sampled {sampled} tokens, trained {trained}"]


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--agent", choices=sorted(HARNESSES), default="claude_code")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder, of the Qwen3 family")
    parser.add_argument("--out", type=Path, required=True, help="folder for data, logs and the dump")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="rollouts of a task [2]")
    parser.add_argument("--at-once", type=int, default=4, help="rollouts at a time [4]")
    options = parser.parse_args()
    samples, sampled = roll(
        options.agent,
        options.tokenizer,
        options.out,
        tasks=options.tasks,
        samples=options.samples,
        at_once=options.at_once,
    )
    print("\n".join(table(samples, sampled)))


if __name__ == "__main__":
    main()
