"""The two engines behind the same server, for the protocol suite."""

import time

from slime.config.sections import EngineConfig
from slime.serving.background import ServerHandle
from slime.serving.scripted import ScriptedAnswer, ScriptedEngine
from tests.tiny import tiny_model_dir, tiny_tokenizer

CONFIG = EngineConfig(max_running_requests=8, max_total_tokens=4096, context_length=512, num_threads=1)
HEALTH_TIMEOUT = 0.3
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
LONG = 400
"""Tokens of an answer that still runs when the test looks at it; ours hold it back under weights `OLD`."""
ENDLESS = 450
"""Tokens of an answer that is ended early; ours take half a minute for it."""
OLD = "old"
TOKEN_SECONDS = 0.06


def endless(call):
    """Letters without end, drawn from the prompt."""
    start = sum(call.input_ids)
    return ScriptedAnswer(token_ids=[68 + (start + 7 * k) % 26 for k in range(512)])


def is_slow(request, version):
    """Whether each token of it takes `TOKEN_SECONDS`."""
    count = request.params.max_new_tokens
    return count >= ENDLESS or (count >= LONG and version == OLD)


class SlowScriptedEngine(ScriptedEngine):
    """Slow where `is_slow`."""

    def _step(self, run, now):
        super()._step(run, now)
        if is_slow(run.request, self.weight_version):
            run.due = now + TOKEN_SECONDS


def scripted_server():
    """The scripted engine, served."""
    engine = SlowScriptedEngine(endless, tiny_tokenizer(), config=CONFIG)
    return ServerHandle(engine, CONFIG, health_timeout=HEALTH_TIMEOUT)


def embedded_server(folder):
    """The embedded engine on a tiny model, served; slow where `is_slow`."""
    from slime.serving.embedded.engine import Engine

    engine = Engine(str(tiny_model_dir(folder)), CONFIG)
    step = engine._stepper.step

    def slow_step():
        step()
        live = engine._scheduler.live.values()
        if any(is_slow(sequence.request, engine.weight_version) for sequence in live):
            time.sleep(TOKEN_SECONDS)

    engine._stepper.step = slow_step
    return ServerHandle(engine, CONFIG, health_timeout=HEALTH_TIMEOUT)


def greedy(max_new_tokens, **more):
    """Sampling parameters that give the same answer each time, of exactly this length."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **more}
