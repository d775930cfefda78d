"""Rollouts per CPU-second of the rollout loop, beside that of verifiers, on an engine that answers at once.

    python benchmarks/orchestration.py --tokenizer .cache/tokenizers/qwen3 --verifiers-python VENV/bin/python

`VENV` holds `verifiers==0.1.14`, whose loop runs inside the trainer's process (that of 0.4 starts a process a
rollout). The engine is a process of its own that sends ready bytes: SGLang's `/generate` to slime, a chat
completion to verifiers, both with token ids and log-probs. Counted is the CPU of the process that runs the
rollouts, and of its children. Both get the same prompts, groups, turns, tokens a turn, slots and an async
reward, and give back token ids and log-probs. `single` is one turn; `tools` is three turns that end in a tool
call. slime tokenizes prompts and tool answers itself; verifiers leaves that to the engine, which does not do
it here, so the comparison favours verifiers. Left out, `--verifiers-python` measures slime alone.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

TURNS = {"single": 1, "tools": 3}
TOOL_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "river"}}\n</tool_call>'
TOOL_ANSWER = "The river is 120 km long and flows to the west. " * 4
WORDS = "the file returns value when test fails path class method error line module before after index data"


def prompt_of(number: int) -> str:
    """About 200 tokens."""
    return f"Question {number}: " + " ".join([WORDS] * 11)


# The engine: its own process, bytes made before.


def engine(pipe, tokenizer: str, tokens: int) -> None:
    """Serve both protocols on a free port, which is told through `pipe`."""
    import orjson
    from aiohttp import web
    from transformers import AutoTokenizer

    ids = _answer_ids(AutoTokenizer.from_pretrained(tokenizer), tokens)
    native = orjson.dumps(
        {
            "text": "word " * 8 + TOOL_CALL,
            "output_ids": ids,
            "meta_info": {
                "id": "1",
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "weight_version": "1",
                "prompt_tokens": 200,
                "completion_tokens": tokens,
                "cached_tokens": 0,
            },
        }
    )
    chat = {called: orjson.dumps(_completion(ids, called)) for called in (False, True)}

    async def generate(request):
        await request.read()
        return web.Response(body=native, content_type="application/json")

    async def complete(request):
        called = b'"tools"' in await request.read()
        return web.Response(body=chat[called], content_type="application/json")

    async def serve():
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", generate)
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(site._server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def _answer_ids(tokenizer, tokens: int) -> list[int]:
    call = tokenizer.encode(TOOL_CALL, add_special_tokens=False)
    word = tokenizer.encode(" word", add_special_tokens=False)[0]
    return [word] * (tokens - len(call)) + call


def _completion(ids: list[int], called: bool) -> dict:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"key": "river"}'},
    }
    message = {"role": "assistant", "content": "word " * 8} | ({"tool_calls": [call]} if called else {})
    entries = [{"token": f"token_id:{i}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for i in ids]
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "prompt_token_ids": list(range(200)),
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if called else "stop",
                "logprobs": {"content": entries},
                "token_ids": ids,
            }
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": len(ids), "total_tokens": 200 + len(ids)},
    }


# slime's side. The hooks are named `orchestration.<name>`.


async def reward(args, sample, **kwargs) -> float:
    """1 for an answer with the word."""
    return float("word" in sample.response)


def lookup(key: str) -> str:
    """Look up a key.

    Args:
        key: what to look up.
    """
    return TOOL_ANSWER if key == "river" else ""


async def three_turns(args, sample, sampling_params):
    """Generate, run the tool that the answer calls, and go on, three times."""
    from slime.rollout.generate import prompt_ids
    from slime.rollout.sglang_rollout import GenerateState

    state = GenerateState(args)
    sample.tokens = prompt_ids(sample, state.tokenizer)
    for turn in range(TURNS["tools"]):
        answer = await state.engine.generate(
            sample.tokens, sampling_params, routing_key=sample.session_id, timeout=args.rollout_timeout
        )
        sample.append_response_tokens(
            args,
            tokens=answer.output_ids,
            log_probs=answer.log_probs,
            meta_info=answer.meta_info,
            text=answer.text,
        )
        call = re.search(r"<tool_call>\s*(\{.*\})\s*</tool_call>", answer.text)
        if call is None or turn == TURNS["tools"] - 1:
            break
        result = lookup(**json.loads(call.group(1))["arguments"])
        text = f"<|im_end|>\n<|im_start|>user\n<tool_response>{result}</tool_response><|im_end|>\n"
        text += "<|im_start|>assistant\n"
        ids = state.tokenizer.encode(text, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=ids, log_probs=None, trainable=False, text=text)
    return sample


class Prompts:
    """The data source: groups in the order of their prompts."""

    def __init__(self, tokenizer, size: int) -> None:
        self.tokenizer, self.size, self.given = tokenizer, size, 0

    def get_samples(self, count: int):
        """New groups."""
        self.given += count
        return [self._group(number) for number in range(self.given - count, self.given)]

    def add_samples(self, groups) -> None:
        """Nothing comes back from a synchronous step without surplus."""
        raise AssertionError(f"{len(groups)} groups came back")

    def _group(self, number: int):
        from slime.utils.types import Sample

        message = [{"role": "user", "content": prompt_of(number)}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        indices = range(number * self.size, (number + 1) * self.size)
        return [Sample(group_index=number, index=index, prompt=text) for index in indices]


def slime_side(options, port: int):
    """A function that runs so many prompts through `generate_rollout`."""
    from slime.rollout.sglang_rollout import GenerateState, generate_rollout

    args = SimpleNamespace(
        hf_checkpoint=options.tokenizer,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        sglang_server_concurrency=options.slots,
        rollout_batch_size=options.prompts,
        n_samples_per_prompt=options.group,
        rollout_temperature=1.0,
        rollout_max_response_len=options.tokens,
        rollout_seed=42,
        rollout_timeout=600.0,
        custom_rm_path="orchestration.reward",
        custom_generate_function_path="orchestration.three_turns" if options.kind == "tools" else None,
    )
    source = Prompts(GenerateState(args).tokenizer, options.group)

    def play(prompts: int) -> int:
        args.rollout_batch_size = prompts
        groups = generate_rollout(args, 0, source).samples
        samples = [sample for group in groups for sample in group]
        sampled = TURNS[options.kind] * options.tokens
        assert all(s.reward == 1.0 and s.effective_response_length == sampled for s in samples)
        return len(samples)

    return play


def verifiers_side(options, port: int):
    """A function that runs so many prompts through `Environment.generate`."""
    import verifiers as vf
    from datasets import Dataset
    from verifiers.clients import resolve_client
    from verifiers.types import ClientConfig

    async def has_word(completion) -> float:
        return float("word" in str(completion[0].content))

    rows = [{"question": prompt_of(number), "answer": ""} for number in range(options.prompts)]
    common = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[has_word])}
    if options.kind == "tools":
        env = vf.ToolEnv(tools=[lookup], max_turns=TURNS["tools"], **common)
    else:
        env = vf.SingleTurnEnv(**common)
    dataset = env.get_dataset().to_list()
    sampling = {"temperature": 1.0, "max_tokens": options.tokens, "logprobs": True}
    sampling["extra_body"] = {"return_token_ids": True}

    async def run(inputs):
        client = resolve_client(ClientConfig(api_base_url=f"http://127.0.0.1:{port}/v1"))
        found = await env.generate(
            inputs,
            client,
            "m",
            sampling,
            max_concurrent=options.slots // options.group,
            state_columns=["trajectory"],
            on_start=lambda *_: None,
            on_progress=lambda *_: None,
        )
        await client.close()
        return found["outputs"]

    def play(prompts: int) -> int:
        outputs = asyncio.run(run([row for row in dataset[:prompts] for _ in range(options.group)]))
        for output in outputs:
            steps = output["trajectory"]
            assert output["reward"] == 1.0 and len(steps) == TURNS[options.kind], output
            assert all(len(step["tokens"]["completion_logprobs"]) == options.tokens for step in steps)
        return len(outputs)

    return play


def cpu_seconds() -> float:
    """Of this process with all its threads, and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def side(options) -> None:
    """Run one framework after a warm-up, and print what it took."""
    play = (slime_side if options.side == "slime" else verifiers_side)(options, options.port)
    play(min(options.prompts, 8))
    before, began = cpu_seconds(), time.perf_counter()
    count = play(options.prompts)
    cpu, wall = cpu_seconds() - before, time.perf_counter() - began
    print(json.dumps({"rollouts": count, "cpu_s": cpu, "wall_s": wall, "per_cpu_s": count / cpu}))


# The driver.


def measure(options, name: str, kind: str, port: int) -> dict:
    """The best of several runs, each in a fresh process."""
    python = options.verifiers_python if name == "verifiers" else sys.executable
    command = [python, __file__, "--tokenizer", options.tokenizer, "--side", name, "--kind", kind]
    command += ["--port", str(port)]
    for flag in ("prompts", "group", "tokens", "slots"):
        command += [f"--{flag}", str(getattr(options, flag))]
    runs = []
    for _ in range(options.repeats):
        ended = subprocess.run(command, env=os.environ, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{name}, {kind}:\n{ended.stderr[-3000:]}")
        runs.append(json.loads(ended.stdout.splitlines()[-1]))
    return {"loop": name, "kind": kind, **max(runs, key=lambda run: run["per_cpu_s"]), "runs": runs}


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--verifiers-python")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--slots", type=int, default=64, help="rollouts that run at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=["slime", "verifiers"], help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=list(TURNS), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(options)
    else:
        drive(options)


def drive(options) -> None:
    """Start the engine, measure all, and print the table."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    server = context.Process(target=engine, args=(child, options.tokenizer, options.tokens), daemon=True)
    server.start()
    port = pipe.recv()
    names = ["slime", "verifiers"] if options.verifiers_python else ["slime"]
    results = []
    for kind, turns in TURNS.items():
        found = {name: measure(options, name, kind, port) for name in names}
        results += found.values()
        for name, row in found.items():
            print(
                f"{kind:7} {turns} turn(s)  {name:9} {row['per_cpu_s']:7.0f} rollouts/CPU-s  "
                f"{row['per_cpu_s'] * turns:7.0f} turns/CPU-s  {1000 / row['per_cpu_s']:6.2f} ms a rollout",
                flush=True,
            )
        if len(found) == 2:
            ratio = found["slime"]["per_cpu_s"] / found["verifiers"]["per_cpu_s"]
            print(f"{kind:7} slime / verifiers: {ratio:.2f}; the aim is 2", flush=True)
    server.kill()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
