"""Prefix-cache hit rate of multi-turn sessions behind a router, by policy.

    python benchmarks/router.py [--sglang-python PYTHON] [--engines N] [--sessions N] [--turns N] [--out FILE]

Sessions go on at the same time, and each turn's prompt is all that was said before and something new, as for
agents. `--group` sessions begin with the same prompt, as the rollouts of a group do. The engines are embedded
ones on a random tiny model; what they have cached is real, and each has room for one and a half times its
share of all sessions. Columns: hit = prompt tokens of later turns that were found in the cache, of those that
the session's earlier turns had sent or sampled (1.0: nothing is computed twice); first = the same of first
prompts, of all but each group's first; busiest = prompt tokens at the engine that got most, of an even share;
seconds of the whole. Each row has a router of its own and begins with empty caches. sglang-router is measured
where --sglang-python has it. The figures but the seconds hardly depend on the machine.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.config.engine_choice import runs_stock_router
from slime.config.sections import EngineConfig
from slime.config.serving_sections import ServingConfig
from slime.serving.embedded.process import EngineProcess
from slime.serving.router import Registration, plan_router, start_router
from slime.serving.topology import ServedModel
from slime.utils.engine_client import EngineClient

POLICIES = {
    "slime": ("consistent_hashing", "power_of_two", "round_robin"),
    "sglang": ("cache_aware", "consistent_hashing", "manual", "power_of_two", "round_robin", "random"),
}
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 128, 48, 16
VOCABULARY = range(40, 250)
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass
class Row:
    """One router with one policy."""

    router: str
    policy: str
    engines: int
    hit: float
    first: float
    busiest: float
    seconds: float

    def line(self):
        shown = (f"{value:8.3f}" for value in (self.hit, self.first, self.busiest))
        return f"{self.router:8}{self.policy:20}{self.engines:7} {' '.join(shown)} {self.seconds:8.1f}"


def main():
    options = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = [stack.enter_context(engine) for engine in start_engines(Path(folder), options)]
        print(
            f"{'router':8}{'policy':20}{'engines':>7} {'hit':>8} {'first':>8} {'busiest':>8} {'seconds':>8}"
        )
        for kind, policy in wanted(options):
            rows.append(measure(kind, policy, engines, options, Path(folder)))
            print(rows[-1].line(), flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", help="interpreter that has sglang-router")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="sessions that begin alike")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="most seconds between two turns")
    parser.add_argument("--policy", nargs="+", help="these only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the rows as JSON")
    return parser.parse_args()


def wanted(options):
    """Pairs of router and policy."""
    stock = runs_stock_router("embedded", options.sglang_python)
    pairs = [(kind, policy) for kind in ("slime", "sglang")[: 1 + stock] for policy in POLICIES[kind]]
    return [pair for pair in pairs if not options.policy or pair[1] in options.policy]


def start_engines(folder, options):
    """Engines on a tiny model, each with room for some of the sessions."""
    from tests.tiny import tiny_model_dir

    model = tiny_model_dir(folder / "model", max_position_embeddings=4096, **SHAPE, num_key_value_heads=2)
    session = FIRST_TOKENS + options.turns * (TURN_TOKENS + ANSWER_TOKENS)
    room = session * options.sessions * 3 // (2 * options.engines)
    config = EngineConfig(num_threads=1, max_total_tokens=room, max_running_requests=64, context_length=4096)
    for number in range(options.engines):
        yield Stopped(EngineProcess(str(model), config, folder / f"engine-{number}.log"))


class Stopped:
    """A process that ends with the block; gives its URL."""

    def __init__(self, process):
        self.process = process

    def __enter__(self):
        return self.process.url

    def __exit__(self, *_):
        self.process.stop()


def measure(kind, policy, engines, options, folder):
    """One row."""
    model = ServedModel(name="m", model_path="m")
    python = options.sglang_python if kind == "sglang" else None
    plan = plan_router(model, ServingConfig(sglang_python=python), {"policy": policy}, engine="embedded")
    router = start_router(plan, folder / "router.log", workers=[Registration(url=url) for url in engines])
    try:
        tally, loads, seconds = asyncio.run(run_sessions(router.url, engines, options))
    finally:
        router.stop()
    return Row(
        router=kind,
        policy=policy,
        engines=len(engines),
        hit=tally["cached"] / tally["known"],
        first=tally["first_cached"] / max(tally["first_known"], 1),
        busiest=max(loads) * len(loads) / sum(loads),
        seconds=seconds,
    )


async def run_sessions(url, engines, options):
    """All sessions at once; returns their tally, the prompt tokens of each engine, and the seconds."""
    clients = [EngineClient(engine) for engine in engines]
    for client in clients:
        await client.flush_cache()
    before = [await prompt_tokens(client) for client in clients]
    tally, started, router = Counter(), time.perf_counter(), EngineClient(url)
    await asyncio.gather(*(session(router, number, options, tally) for number in range(options.sessions)))
    seconds = time.perf_counter() - started
    after = [await prompt_tokens(client) for client in clients]
    return tally, [new - old for new, old in zip(after, before, strict=True)], seconds


async def prompt_tokens(client):
    state = (await client.server_info())["internal_states"][0]
    return state["total_prefill_tokens"] + state["total_cached_tokens"]


async def session(client, number, options, tally):
    """One agent: every turn sends all before it, and waits for its answer."""
    draw = random.Random(f"{options.seed}/{number}")
    group, place = divmod(number, options.group)
    tokens = random.Random(f"{options.seed}/group {group}").choices(VOCABULARY, k=FIRST_TOKENS)
    params = {"max_new_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 1.0}
    known = 0
    for turn in range(options.turns):
        await asyncio.sleep(draw.uniform(0, options.pause))
        answer = await client.generate(tokens, params, routing_key=f"session-{number}", timeout=600.0)
        cached = int(answer.meta_info["cached_tokens"])
        if turn:
            tally["known"] += known
            tally["cached"] += min(cached, known)
        elif place:
            # The last token of a prompt is always computed.
            tally["first_known"] += len(tokens) - 1
            tally["first_cached"] += cached
        tokens = tokens + answer.output_ids
        # Of what an engine has sampled, it has computed all but the last token.
        known = len(tokens) - 1
        tokens = tokens + draw.choices(VOCABULARY, k=TURN_TOKENS)


if __name__ == "__main__":
    main()
