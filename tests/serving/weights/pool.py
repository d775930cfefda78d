"""Embedded engines on tiny models, a source of weights, and what engines and transformers compute."""

import contextlib
import http.client
import resource
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import torch

from slime.config.sections import EngineConfig
from slime.config.serving_sections import WeightsConfig
from slime.serving.background import ServerHandle
from slime.serving.embedded.engine import Engine
from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.factory import make_weight_sync
from tests.serving.wire import ok

PROMPT = [70, 71, 72, 73, 74, 75, 80, 81]
CONFIG = EngineConfig(max_running_requests=4, max_total_tokens=1024, context_length=128, num_threads=1)
SMALL = 40_000
"""Bytes of a bucket: several of them for a tiny model."""


class ModelSource:
    """A `WeightSource` of a Hugging Face model; counts how often it was gone through."""

    def __init__(self, model):
        self.model = model
        self.passes = 0

    def present(self):
        return contextlib.nullcontext()

    def weights(self):
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()
        self.passes += 1

    def change(self, seed):
        """Other weights, as a step would leave them."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


class SleepingSource(ModelSource):
    """Has its weights only while they are lent."""

    is_awake = True

    @contextlib.contextmanager
    def present(self):
        for parameter, data in zip(self.model.parameters(), self.away, strict=True):
            parameter.data = data
        self.is_awake = True
        yield
        self.fall_asleep()

    def fall_asleep(self):
        self.is_awake = False
        self.away = [parameter.data for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data = torch.full_like(parameter.data, float("nan"))


class StrikingSource(ModelSource):
    """Strikes when the weights are half gone through."""

    strike = staticmethod(lambda: None)

    def weights(self):
        pairs = [*super().weights()]
        for number, pair in enumerate(pairs):
            if number == len(pairs) // 2:
                self.strike()
            yield pair


@contextlib.contextmanager
def engines(folder, count=1, config=CONFIG):
    """Served engines, as (handle, endpoint) pairs."""
    with contextlib.ExitStack() as stack:
        handles = [
            stack.enter_context(ServerHandle(Engine(str(folder), config), config)) for _ in range(count)
        ]
        yield [
            (handle, EngineEndpoint(name=f"engine-{i}", url=handle.url, kind="embedded"))
            for i, handle in enumerate(handles)
        ]


@contextlib.contextmanager
def no_room():
    """This process can write no file of more than some bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def hanging(endpoint, at):
    """The engine behind a server that passes calls on, but those to paths that begin with `at`."""
    end = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self):
            if self.path.startswith(at):
                end.wait()
                return
            connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_POST = do_OPTIONS = pass_on  # noqa: N815 - names of the base class

        def log_message(self, *_):
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield replace(endpoint, url=f"http://127.0.0.1:{server.server_port}")
    end.set()
    server.shutdown()
    server.server_close()


def scores(url, prompt=PROMPT):
    """The engine's log-probs of the prompt, and the weight version that it names."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    meta = ok(url, "/generate", body | {"return_logprob": True})["meta_info"]
    return [value for value, *_ in meta["input_token_logprobs"][1:]], meta["weight_version"]


def expected(model, prompt=PROMPT):
    """The same by transformers."""
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]


def make(folder, source, transport, **options):
    flags = {k: options.pop(k) for k in list(options) if k.startswith("update_weight_")}
    config = WeightsConfig(update_weight_transport=transport, update_weight_buffer_size=SMALL, **flags)
    options = {"timeout": 30.0, "one_machine": True, "engine_kind": "embedded"} | options
    return make_weight_sync(config, source=source, hf_checkpoint=str(folder), **options)


def check(endpoints, model, version, failed=()):
    for _, endpoint in endpoints:
        if endpoint.name not in failed:
            found, named = scores(endpoint.url)
            assert named == version
            assert found == pytest.approx(expected(model), abs=1e-4)
