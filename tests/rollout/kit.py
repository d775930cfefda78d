"""What tests of the execution side share: args, data sources, engines, and a raw HTTP server for faults."""

import asyncio
import contextlib
import functools
from types import SimpleNamespace

from aiohttp import web

from slime.config.sections import EngineConfig
from slime.rollout.outcome import Completed, Failed, Rollout
from slime.rollout.sglang_rollout import GenerateState
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.utils.engine_client import EngineClient
from slime.utils.types import Sample
from tests.tiny import tiny_tokenizer

HOOKS = "tests.rollout.agent_hooks."


@functools.cache
def tokenizer():
    return tiny_tokenizer()


def engine_args(url, folder=None, **values):
    """Args of a small synchronous rollout on the engine at `url`."""
    host, _, port = url.removeprefix("http://").partition(":")
    defaults = {
        "hf_checkpoint": folder,
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
        "sglang_server_concurrency": 512,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": None,
        "rollout_temperature": 1.0,
        "rollout_max_response_len": 16,
        "rollout_seed": 42,
        "rollout_timeout": 20.0,
        "reward_timeout": 20.0,
        "max_failed_rollout_ratio": 0.5,
        "custom_rm_path": HOOKS + "reward_by_length",
    }
    return SimpleNamespace(**(defaults | values))


def state_for(args):
    """The process's rollout state for `args`, with the tiny tokenizer and quick retries in it."""
    GenerateState.clear_instance()
    state = GenerateState(args)
    state.__dict__["tokenizer"] = tokenizer()
    state.__dict__["engine"] = EngineClient(state.engine.url, backoff=0.01)
    return state


@contextlib.contextmanager
def scripted(policy=None, **config):
    """A scripted engine; by default it answers with a letter or two."""
    answer = policy or (lambda call: ScriptedAnswer(text="ab"[: 1 + call.number % 2]))
    settings = EngineConfig(**({"max_running_requests": 512} | config))
    with start_scripted_server(answer, tokenizer(), config=settings) as server:
        yield server


class ListSource:
    """Groups of `size` rollouts with the prompts ``p0``, ``p1``, ... ; what comes back is given out first."""

    def __init__(self, size=2, prompts=10**6, prompt="p{}", prepare=lambda sample: None):
        self.size, self.prompts, self.prompt, self.prepare = size, prompts, prompt, prepare
        self.given = 0
        self.returned = []

    def get_samples(self, count):
        groups = self.returned[:count]
        del self.returned[:count]
        while len(groups) < count and self.given < self.prompts:
            groups.append(self._group(self.given))
            self.given += 1
        return groups

    def add_samples(self, groups):
        self.returned.extend(groups)

    def _group(self, number):
        samples = []
        for slot in range(self.size):
            index = number * self.size + slot
            sample = Sample(
                group_index=number, index=index, rollout_id=index, prompt=self.prompt.format(number)
            )
            self.prepare(sample)
            samples.append(sample)
        return samples


def finished(sample, reward=1.0, **fields):
    """The sample with a response of two sampled tokens."""
    sample.tokens, sample.response_length = [7, 8, 9], 2
    sample.loss_mask, sample.rollout_log_probs = [1, 1], [-0.5, -0.25]
    sample.status, sample.reward = Sample.Status.COMPLETED, reward
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def completed_rollout(sample, reward=1.0):
    return Rollout(
        group_index=sample.group_index,
        rollout_id=sample.rollout_id,
        samples=(finished(sample, reward),),
        fan_out=False,
        outcome=Completed(),
    )


def failed_rollout(sample, reason="generate: ValueError"):
    rollout = Rollout(
        group_index=sample.group_index,
        rollout_id=sample.rollout_id,
        samples=(sample,),
        fan_out=False,
        outcome=Failed(reason, "hook", "it broke"),
    )
    rollout.void_unless_valid()
    return rollout


@contextlib.asynccontextmanager
async def raw_server(handler, path="/generate"):
    """An HTTP server with one handler, for answers that no engine should give; yields its URL."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def until(condition, what="condition"):
    """Wait for something that must happen; fails after 20 s."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not come")
