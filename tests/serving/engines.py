"""The two engines behind the same server, for the protocol suite."""

from slime.config.sections import EngineConfig
from slime.serving.background import ServerHandle
from slime.serving.scripted import ScriptedAnswer, ScriptedEngine
from tests.tiny import tiny_model_dir, tiny_tokenizer

CONFIG = EngineConfig(max_running_requests=8, max_total_tokens=4096, context_length=512, num_threads=1)
HEALTH_TIMEOUT = 0.3
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
LONG = 400
"""Tokens of an answer that is still running when the test looks at it."""


def endless(call):
    """Letters without end, drawn from the prompt; slow where the answer is long."""
    start = sum(call.input_ids)
    ids = [68 + (start + 7 * k) % 26 for k in range(512)]
    return ScriptedAnswer(token_ids=ids, token_latency=0.003 if call.params.max_new_tokens >= LONG else 0.0)


def scripted_server():
    """The scripted engine, served."""
    engine = ScriptedEngine(endless, tiny_tokenizer(), config=CONFIG)
    return ServerHandle(engine, CONFIG, health_timeout=HEALTH_TIMEOUT)


def embedded_server(folder):
    """The embedded engine on a tiny model, served."""
    from slime.serving.embedded.engine import Engine

    engine = Engine(str(tiny_model_dir(folder, hidden_size=128, num_hidden_layers=4)), CONFIG)
    return ServerHandle(engine, CONFIG, health_timeout=HEALTH_TIMEOUT)


def greedy(max_new_tokens, **more):
    """Sampling parameters that give the same answer each time, of exactly this length."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **more}
