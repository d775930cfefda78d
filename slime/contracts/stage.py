"""The stage on which hooks are tried: the scripted engine, the arguments that lead to it, and samples.

Invariant: one engine URL for the life of a stage, as in a run; what it answers is changed by `playing`.
Everything asynchronous runs on the rollout loop, as in a run, and no wait is without a deadline (law 6).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from slime.config import load_config
from slime.config.args_view import ArgsView
from slime.contracts.finding import ContractError, broken
from slime.contracts.tokenizer import write_byte_tokenizer
from slime.contracts.trace import Served
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.loop import background_loop
from slime.rollout.session import SESSION
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.state import base_sampling_params
from slime.rollout.tasks import GRACE_SECONDS
from slime.serving.script import script_of
from slime.serving.scripted import Policy, ScriptedAnswer, ScriptedCall, ScriptedServer, start_scripted_server
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

T = TypeVar("T")
SECONDS = 10.0
"""Deadline of one call of a hook, unless the user gives another."""
PROBE_SECONDS = 3.0
"""How long the engine lets a hook hold up the event loop before it answers."""
RESPONSE_TOKENS = 64
WORDS = ("alpha", "bravo", "cedar", "delta", "ember", "flint", "grove", "heron")
ANSWER = "The answer is 42."


def plain_answers(call: ScriptedCall) -> ScriptedAnswer:
    """The same answer to everything."""
    return ScriptedAnswer(text=ANSWER)


class Stage:
    """A context manager.

    Args:
        argv: flags of training; a key that they leave unset gets a value that suits a check.
        script: dotted path of a policy (`slime.serving.scripted.Policy`) that answers in place of a constant
            text, for hooks that need certain answers.
        seconds: deadline of one call of a hook.

    Attributes:
        args: what hooks get.
        served: every request so far, with what it was answered.
        held_up: requests during which the event loop did not move for `PROBE_SECONDS`.

    Raises:
        ConfigError: a flag that is not known.
    """

    def __init__(self, argv: list[str], *, script: str | None = None, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.served: list[Served] = []
        self.held_up: list[int] = []
        self.answers: Policy = load_function(script) if script else plain_answers
        self.has_script = script is not None
        self.is_blocked = ""
        self._policy = self.answers
        self._probing = False
        self._version = SESSION.version
        self._argv = argv

    def __enter__(self) -> Stage:
        config = load_config(self._argv, prog="slime check", checks=(_no_check,))
        self._folder = tempfile.TemporaryDirectory(prefix="slime-check-")
        self.folder = Path(self._folder.name)
        model = config.model.hf_checkpoint or str(write_byte_tokenizer(self.folder / "tokenizer"))
        self.tokenizer = load_tokenizer(model)
        self.server: ScriptedServer = start_scripted_server(self._answer, self.tokenizer)
        self.args = self._args(config.args(), model)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.end_rollouts()
        SESSION.version = self._version
        self.server.stop()
        self._folder.cleanup()
        GenerateState.clear_instance()

    def _args(self, args: ArgsView, model: str) -> ArgsView:
        host, _, port = self.server.url.removeprefix("http://").rpartition(":")
        return args.with_values(
            hf_checkpoint=model,
            sglang_router_ip=host,
            sglang_router_port=int(port),
            rollout_batch_size=2,
            over_sampling_batch_size=2,
            n_samples_per_prompt=2,
            rollout_max_response_len=args.rollout_max_response_len or RESPONSE_TOKENS,
            rollout_timeout=min(args.rollout_timeout, self.seconds),
            reward_timeout=min(args.reward_timeout, self.seconds),
        )

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Those of training rollouts; a copy that shares nothing."""
        return copy.deepcopy(base_sampling_params(self.args))

    def samples(self, count: int) -> list[Sample]:
        """Fresh samples of different groups: of ``--prompt-data`` where it is set, else made-up questions."""
        if self.args.prompt_data:
            source = RolloutDataSource(self.args.with_values(n_samples_per_prompt=1))
            samples = [sample for group in source.get_samples(count) for sample in _flat(group)]
        else:
            samples = [_question(number) for number in range(count)]
        for sample in samples:
            sample.session_id = uuid.uuid4().hex
        return samples

    @contextlib.contextmanager
    def playing(self, policy: Policy, *, probing: bool = False) -> Iterator[None]:
        """Let `policy` answer; while `probing`, an answer waits until the event loop has moved."""
        self._policy, self._probing = policy, probing
        try:
            yield
        finally:
            self._policy, self._probing = self.answers, False

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The value of `work`, which keeps to `seconds` by itself, on the rollout loop.

        Raises:
            ContractError: the event loop does not move any more; nothing can be run after that.
            BaseException: what `work` raises.
        """
        if self.is_blocked:
            work.close()
            raise ContractError(self.is_blocked, remedy=_UNBLOCK)
        loop = background_loop()
        future = asyncio.run_coroutine_threadsafe(work, loop.loop)
        try:
            return future.result(seconds + 2 * GRACE_SECONDS)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
        error = broken(
            "a hook that lets the event loop go on",
            f"that it has stood still for {seconds:g} s at {_place(loop.thread)}",
            _UNBLOCK,
        )
        self.is_blocked = error.message
        raise error

    def end_rollouts(self) -> None:
        """End what a rollout function keeps in flight over steps; its groups go back to their source."""
        if not self.is_blocked:
            self.run(SESSION.close(), 2 * GRACE_SECONDS)

    @property
    def busy(self) -> int:
        """Requests at the engine."""
        stats = self.server.engine.stats
        return stats.running + stats.waiting

    def _answer(self, call: ScriptedCall) -> ScriptedAnswer:
        """On the engine's thread: the policy's answer, noted before it goes out."""
        if self._probing and not _moves(background_loop().loop):
            self.held_up.append(call.number)
        answer = self._policy(call)
        script = script_of(answer, call.params, self.tokenizer)
        nothing = answer.hang or answer.error is not None
        self.served.append(
            Served(
                number=call.number,
                rid=call.rid,
                input_ids=call.input_ids,
                token_ids=() if nothing else tuple(script.token_ids),
                logprobs=() if nothing else tuple(script.logprobs),
                params={name: getattr(call.params, name) for name in ("temperature", "top_p", "top_k")},
            )
        )
        return answer


_UNBLOCK = "await what takes time, or give it to asyncio.to_thread; no requests.get, no time.sleep"


def _no_check(config: object, given: object) -> Iterator[Any]:
    """A configuration for a check needs neither data nor a model."""
    return iter(())


def _question(number: int) -> Sample:
    word = WORDS[number % len(WORDS)]
    return Sample(
        group_index=number,
        index=number,
        rollout_id=number,
        prompt=f"Question {word}: what is 6 times 7?",
        label="42",
    )


def _flat(group: Any) -> list[Sample]:
    return [sample for item in group for sample in (item if isinstance(item, list) else [item])]


def _moves(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop does something within `PROBE_SECONDS`."""
    moved = threading.Event()
    loop.call_soon_threadsafe(moved.set)
    return moved.wait(PROBE_SECONDS)


def _place(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "an ended thread"
    last = traceback.extract_stack(frame, limit=1)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"
