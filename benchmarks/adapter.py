"""CPU of the Anthropic adapter per turn, requests per second, memory a turn, and delay of the first byte.

    python benchmarks/adapter.py --tokenizer .cache/tokenizers/qwen3 [--quick]

The engine answers at once, so that what is measured is the adapter. Engine, adapter and clients are three
processes; requests are as large as Claude Code's (80 KB, 21 tools) and the conversation grows by about 430
tokens a turn. `--quick` runs fewer sessions.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time

from processes_of_adapter import adapter_process, engine_process

TURNS = 50
CASES = [
    *((1, 5, "small"), (32, 5, "small"), (256, 5, "small")),
    *((1, 5, "cc"), (32, 3, "cc"), (256, 2, "cc")),
]
WORDS = [
    *("the", "file", "function", "returns", "value", "when", "test", "fails", "path", "class", "method"),
    *("error", "import", "line", "module", "assert", "before", "after", "index", "data", "check", "config"),
    *("parse", "request", "session", "token", "model"),
]


def words(count, seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + rng.choice(["", "", "", ".", ",", "_x", "()"]) for _ in range(count))


def tools(count):
    return [
        {
            "name": f"Tool{i}" if i else "Read",
            "description": words(320, i),
            "input_schema": {
                "type": "object",
                "properties": {f"p{k}": {"type": "string", "description": words(12, k)} for k in range(5)},
            },
        }
        for i in range(count)
    ]


class Client:
    """A Claude-Code-like conversation."""

    def __init__(self, url, sid, http, *, size):
        self.url, self.http, self.size = f"{url}/s/{sid}/v1/messages?beta=true", http, size
        big = size == "cc"
        self.system = [{"type": "text", "text": words(2600 if big else 20, 7)}]
        self.tools = tools(21 if big else 1)
        first = words(1400 if big else 20, 11)
        self.messages = [{"role": "user", "content": [{"type": "text", "text": first + sid}]}]
        self.result = words(290 if big else 60, 13)
        self.number = 0

    def body(self, stream):
        return json.dumps(
            {
                "model": "m",
                "max_tokens": 32000,
                "system": self.system,
                "tools": self.tools,
                "messages": self.messages,
                "stream": stream,
            }
        ).encode()

    async def turn(self, stream=True):
        """One turn; returns the seconds that it took, and the time at which text came."""
        body, started, first = self.body(stream), time.perf_counter(), None
        async with self.http.post(self.url, data=body) as response:
            chunks = []
            async for chunk in response.content.iter_any():
                if first is None and b"_delta" in chunk:
                    first = time.monotonic()
                chunks.append(chunk)
        seconds = time.perf_counter() - started
        content = blocks(b"".join(chunks)) if stream else json.loads(b"".join(chunks))["content"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"{self.number} {self.result}"}
            for block in content
            if block["type"] == "tool_use"
        ]
        self.number += 1
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
        return seconds, first


def blocks(raw):
    """The content blocks of a stream."""
    found = {}
    for event in raw.split(b"\n\n"):
        _, _, data = event.partition(b"data: ")
        if not data:
            continue
        event = json.loads(data)
        if event["type"] == "content_block_start":
            found[event["index"]] = event["content_block"] | {"json": ""}
        if event["type"] == "content_block_delta":
            block, delta = found[event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] = block.get(name, "") + delta[name]
            block["json"] += delta.get("partial_json", "")
    for block in found.values():
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return list(found.values())


class Bench:
    """Engine and adapter in processes of their own."""

    def __init__(self, tokenizer, *, token_seconds=0.0, trace_memory=False):
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.engine = context.Process(target=engine_process, args=(child, tokenizer, token_seconds))
        self.engine.start()
        engine_url = self.pipe.recv()
        self.control, child = context.Pipe()
        self.adapter = context.Process(
            target=adapter_process, args=(child, tokenizer, engine_url, trace_memory)
        )
        self.adapter.start()
        self.url = self.control.recv()

    def open(self, sids):
        self.control.send(("open", sids))
        self.control.recv()

    def collect(self, sids):
        """Finish sessions; returns (tokens sampled, tokens trained)."""
        self.control.send(("finish", sids))
        return self.control.recv()

    def cpu(self):
        """CPU seconds of the adapter so far."""
        self.control.send(("cpu", None))
        return self.control.recv()

    def memory(self):
        """Bytes that the adapter's objects take."""
        self.control.send(("memory", None))
        return self.control.recv()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.adapter, self.engine):
            process.kill()
            process.join()


async def growing(bench, size):
    """CPU seconds of the adapter for each turn of one conversation."""
    import aiohttp

    warm, one = f"warm-{size}", f"one-{size}"
    bench.open([warm, one])
    costs = []
    async with aiohttp.ClientSession() as http:
        await Client(bench.url, warm, http, size=size).turn()
        client = Client(bench.url, one, http, size=size)
        for _ in range(TURNS):
            before = bench.cpu()
            await client.turn()
            costs.append(bench.cpu() - before)
    sampled, trained = bench.collect([one, warm])
    assert sampled == trained > 0, (sampled, trained)
    return costs


async def many(bench, sessions, turns, size):
    """Requests a second, adapter CPU seconds a request, median and p99 seconds of a request."""
    import aiohttp

    sids = [f"{size}-{sessions}-{i}" for i in range(sessions)]
    bench.open(sids)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def one(sid):
            client = Client(bench.url, sid, http, size=size)
            return [(await client.turn())[0] for _ in range(turns)]

        before, started = bench.cpu(), time.perf_counter()
        seconds = sorted(s for row in await asyncio.gather(*map(one, sids)) for s in row)
        wall, cpu = time.perf_counter() - started, bench.cpu() - before
    sampled, trained = bench.collect(sids)
    assert sampled == trained > 0, (sampled, trained)
    count = len(seconds)
    return count / wall, cpu / count, statistics.median(seconds), seconds[int(count * 0.99)]


async def memory(bench, sessions, turns):
    """Bytes that the adapter keeps for a turn, beyond the first turn of each session."""
    import aiohttp

    sids = [f"m{i}" for i in range(sessions)]
    bench.open(sids)
    async with aiohttp.ClientSession() as http:
        clients = [Client(bench.url, sid, http, size="cc") for sid in sids]
        for client in clients:
            await client.turn()
        before = bench.memory()
        for _ in range(turns):
            for client in clients:
                await client.turn()
        after = bench.memory()
    bench.collect(sids)
    return (after - before) / (sessions * turns)


async def first_byte(bench, repeats):
    """Seconds from the engine's first token to the client's first text, the median."""
    import aiohttp

    sids = [f"f{i}" for i in range(repeats)]
    bench.open(sids)
    delays = []
    async with aiohttp.ClientSession() as http:
        for sid in sids:
            _, first = await Client(bench.url, sid, http, size="cc").turn()
            sent = bench.pipe.recv()
            delays.append(first - sent)
    bench.collect(sids)
    return statistics.median(delays)


def milliseconds(values):
    return " / ".join(f"{1000 * value:.1f}" for value in values)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with Bench(options.tokenizer, trace_memory=True) as bench:
        kept = asyncio.run(memory(bench, 4, 10 if options.quick else 40))
        print(f"memory a turn: {kept / 1000:.1f} kB", flush=True)
    with Bench(options.tokenizer) as bench:
        for size in ("small", "cc"):
            costs = asyncio.run(growing(bench, size))
            parts = [statistics.mean(costs[a:b]) for a, b in ((0, 5), (20, 25), (45, 50))]
            print(f"{size}: CPU ms a turn at turns 1-5 / 21-25 / 46-50: {milliseconds(parts)}", flush=True)
        cases = [
            (1, 5, "small"),
            (32, 5, "small"),
            (256, 5, "small"),
            (1, 5, "cc"),
            (32, 3, "cc"),
            (256, 2, "cc"),
        ]
        for sessions, turns, size in cases[:2] if options.quick else cases:
            rate, cpu, median, last = asyncio.run(many(bench, sessions, turns, size))
            print(
                f"{sessions} sessions x {turns} turns, {size}: {rate:.0f} requests/s, "
                f"{1000 * cpu:.1f} ms CPU a request, p50 / p99 ms: {milliseconds((median, last))}",
                flush=True,
            )
    with Bench(options.tokenizer, token_seconds=0.05) as bench:
        delay = asyncio.run(first_byte(bench, 5))
        print(f"first text after the engine's first token: {1000 * delay:.1f} ms (a token each 50 ms)")


if __name__ == "__main__":
    main()
