"""A router before scripted engines, for tests of any router."""

import asyncio
import contextlib
import json
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from slime.config.router_section import RouterSettings
from slime.config.sections import EngineConfig
from slime.config.serving_sections import ServingConfig
from slime.serving.embedded_router.server import RouterServer
from slime.serving.router import Registration, RouterClient, plan_router, start_router
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.serving.topology import ServedModel
from tests.tiny import tiny_tokenizer

MODEL = ServedModel(name="actor", model_path="models/actor")
PROMPT = [40, 41, 42]


def letters(call):
    """A short answer that the prompt decides."""
    return ScriptedAnswer(token_ids=[68 + sum(call.input_ids) % 26] * 3)


@contextlib.contextmanager
def engines(count, policy=letters):
    """`count` scripted engines."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(engine(policy)) for _ in range(count)]


def engine(policy=letters, port=0):
    """One scripted engine."""
    config = EngineConfig(max_running_requests=64)
    return start_scripted_server(policy, tiny_tokenizer(), config=config, port=port)


@contextlib.contextmanager
def router(log, servers=(), *, model=MODEL, engine="embedded", python=None, fault_tolerance=True, **flags):
    """A router process before `servers`."""
    serving = ServingConfig(sglang_python=python, use_fault_tolerance=fault_tolerance)
    plan = plan_router(model, serving, flags, engine=engine)
    process = start_router(plan, log, workers=[Registration(url=server.url) for server in servers])
    try:
        yield process
    finally:
        process.stop()


class BackgroundRouter:
    """The router of ours on a thread of this process: what `router` gives, sooner."""

    def __init__(self, settings):
        self.is_alive = True
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self.client = RouterClient(self.url)
        self._loop, self._end, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=[self._run(settings, started)]
        )
        self._thread.start()
        assert started.wait(20)

    @property
    def awaited(self):
        """How many workers it waits for."""
        return len(self._server._workers._starting)

    async def _run(self, settings, started):
        self._server = RouterServer(settings)
        await self._server.start(self._sock)
        started.set()
        await self._end.wait()
        await self._server.stop()

    def stop(self):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()
        self.is_alive = False


@contextlib.contextmanager
def background_router(servers=(), **settings):
    """A router of ours before `servers`."""
    router = BackgroundRouter(RouterSettings(**({"health_failure_threshold": 1} | settings)))
    try:
        for server in servers:
            router.client.add(server.url)
        yield router
    finally:
        router.stop()


def ask(url, body=None, key=None, timeout=30):
    """One `/generate` call; the raw answer."""
    headers = {"Content-Type": "application/json"} | ({"X-SMG-Routing-Key": key} if key else {})
    content = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}} | (body or {})
    request = urllib.request.Request(url + "/generate", json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def ask_all(url, keys, at_once=8, prompts=None):
    """One call a key, which may be None; `prompts` by key."""

    def call(item):
        body = {"rid": f"r{item[0]}"} | ({} if prompts is None else {"input_ids": prompts[item[1]]})
        return ask(url, body, item[1])

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(call, enumerate(keys)))


def places(servers, keys):
    """The number of the server that answered each of `ask_all(url, keys)`."""
    numbers = {call.rid: n for n, server in enumerate(servers) for call in server.engine.calls}
    return [numbers[f"r{position}"] for position in range(len(keys))]


def forget(servers):
    """Forget all calls so far."""
    for server in servers:
        server.engine.calls.clear()
