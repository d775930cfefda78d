"""The two servers of `adapter.py`: an engine that answers at once, and the adapter."""

import asyncio
import gc
import resource
import time
import tracemalloc

ANSWER = (
    '<think>\nI read the file.\n</think>\n\nReading.\n<tool_call>\n{"name": "Read", "arguments": '
    '{"file_path": "/workspace/project/module.py"}}\n</tool_call><|im_end|>'
)


def engine_process(pipe, tokenizer, token_seconds):
    """Answer every request with the same tokens; a stream of them where tokens take time."""
    import orjson
    from aiohttp import web
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tokenizer).encode(ANSWER, add_special_tokens=False)

    def answer(count, finish):
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in ids[:count]],
            "finish_reason": finish,
            "weight_version": "1",
            "prompt_tokens": 1,
            "cached_tokens": 0,
        }
        return orjson.dumps({"text": "", "output_ids": ids[:count], "meta_info": meta})

    whole = answer(len(ids), {"type": "stop", "matched": ids[-1]})
    parts = [answer(count, None) for count in range(1, len(ids))]

    async def generate(request):
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        for number, part in enumerate(parts if token_seconds else []):
            await response.write(b"data: " + part + b"\n\n")
            if number == FIRST_TEXT:
                pipe.send(time.monotonic())
            await asyncio.sleep(token_seconds)
        await response.write(b"data: " + whole + b"\n\ndata: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    asyncio.run(serve(app, lambda url: pipe.send(url)))


FIRST_TEXT = 2
"""The number of the token with which the first visible character comes (behind `<think>` and a line end)."""


def adapter_process(pipe, tokenizer, engine_url, trace_memory):
    """The adapter, and a thread that opens and finishes sessions when told."""
    import threading

    from transformers import AutoTokenizer

    from slime.agent.adapters import AnthropicAdapter
    from slime.utils.types import Sample

    if trace_memory:
        tracemalloc.start()
    adapter = AnthropicAdapter(tokenizer=AutoTokenizer.from_pretrained(tokenizer), sglang_url=engine_url)

    def control():
        while True:
            verb, sids = pipe.recv()
            if verb == "open":
                for sid in sids:
                    adapter.open_session(sid)
                pipe.send(None)
            elif verb == "cpu":
                pipe.send(time.process_time())
            elif verb == "memory":
                gc.collect()
                pipe.send(tracemalloc.get_traced_memory()[0])
            else:
                tally = [0, 0]
                for sid in sids:
                    samples = asyncio.run(adapter.finish_session(sid, base_sample=Sample(index=0)))
                    tally[0] += samples[0].metadata["trajectory"]["tokens"]
                    tally[1] += sum(sum(sample.loss_mask) for sample in samples)
                pipe.send(tuple(tally))

    threading.Thread(target=control, daemon=True).start()
    asyncio.run(serve(adapter.app, lambda url: pipe.send(url)))


async def serve(app, tell):
    from slime.agent.aiohttp_threaded import serve_app

    _, port = await serve_app(app)
    tell(f"http://127.0.0.1:{port}")
    await asyncio.Event().wait()


resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
