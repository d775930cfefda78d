"""Running requests on an engine without HTTP, and the plain transformers forward to compare with."""

import contextlib
import threading

from slime.config.sections import EngineConfig
from slime.serving.embedded.engine import Engine
from slime.serving.embedded.request import Request, SamplingParams

DRAG = 0.1


class Inbox:
    """A listener that keeps the updates of one request and can be waited for.

    A streamed request with `hold` tokens gets further ones slowly until its result is asked for.
    """

    def __init__(self, hold=None):
        self.updates = []
        self._hold = hold
        self._changed = threading.Condition()
        self._is_awaited = threading.Event()

    def __call__(self, update):
        with self._changed:
            self.updates.append(update)
            self._changed.notify_all()
        if self._hold is not None and update.finish_reason is None and len(update.output_ids) >= self._hold:
            self._is_awaited.wait(DRAG)

    def wait_for(self, condition):
        with self._changed:
            assert self._changed.wait_for(lambda: self.updates and condition(self.updates[-1]), timeout=60)
            return self.updates[-1]

    def result(self):
        self._is_awaited.set()
        return self.wait_for(lambda update: update.finish_reason is not None)

    def tokens(self, count):
        return self.wait_for(
            lambda update: len(update.output_ids) >= count or update.finish_reason is not None
        )


@contextlib.contextmanager
def running(folder, **config):
    engine = Engine(str(folder), EngineConfig(num_threads=1, **config))
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


_count = iter(range(10**9))


def request(ids, *, greedy=True, score=None, top=0, stream=False, **params):
    """A request with log-probs; greedy unless told otherwise, never ended by an end-of-text token."""
    params = {"max_new_tokens": 8, "ignore_eos": True} | ({"temperature": 0.0} if greedy else {}) | params
    return Request(
        rid=f"r{next(_count)}",
        input_ids=list(ids),
        params=SamplingParams(**params),
        return_logprob=True,
        logprob_start_len=-1 if score is None else score,
        top_logprobs_num=top,
        stream=stream,
    )


def send(engine, req, *, hold=None):
    inbox = Inbox(hold)
    engine.submit(req, inbox)
    return inbox


def generate(engine, requests):
    """Final updates of requests that are sent together."""
    return [inbox.result() for inbox in [send(engine, r) for r in requests]]


def one(engine, ids, **options):
    return generate(engine, [request(ids, **options)])[0]


def plain_logprobs(folder, ids):
    """log softmax [len(ids), vocab] of the model's own eager forward in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)
