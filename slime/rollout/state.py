"""`GenerateState`: what all rollouts of a process share: engine client, tokenizer, slots, base sampling.

Invariant: one a process, rebuilt when a value that it was built from changes; what belongs to an event loop
is made for the loop that asks. The tokenizer loads at first use: hooks may not need one.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from typing import Any, cast
from weakref import WeakKeyDictionary

from slime.errors import ConfigError
from slime.rollout.accounting import Ledger
from slime.rollout.generate import Tokenizer
from slime.utils.engine_client import EngineClient
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_tokenizer

SLOTS_OF_ONE = 512
"""Where ``--sglang-server-concurrency`` says nothing."""
_BUILT_FROM = (
    "hf_checkpoint",
    "sglang_router_ip",
    "sglang_router_port",
    "sglang_server_concurrency",
    "rollout_num_engines",
    "use_fault_tolerance",
    "rollout_temperature",
    "rollout_top_p",
    "rollout_top_k",
    "rollout_max_response_len",
    "rollout_stop",
    "rollout_stop_token_ids",
    "rollout_skip_special_tokens",
)


class _RebuiltMeta(SingletonMeta):
    """A singleton that is built anew for arguments that differ."""

    def __call__(self, args: Any) -> Any:
        state = SingletonMeta._instances.get(self)
        if state is not None and state.args is not args:
            if state.built_from != _values(args):
                self.clear_instance()
            else:
                state.args = args
        return super().__call__(args)


class GenerateState(metaclass=_RebuiltMeta):
    """Shared state of rollouts.

    Attributes:
        sampling_params: SGLang's names; copy before changing.
        aborted: set by `abort`: rollouts that wait for a slot give up.
        ledger: books of all steps so far (law 5).
        counts: of the step, for its metrics; see `RolloutRunner`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.built_from = _values(args)
        self.sampling_params = base_sampling_params(args)
        self.aborted = False
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of ``--hf-checkpoint``."""
        return cast("Tokenizer", load_tokenizer(getattr(self.args, "hf_checkpoint", None)))

    @functools.cached_property
    def engine(self) -> EngineClient:
        """Client of the engine or router; where engines are replaced, calls wait for the new one."""
        replaced = getattr(self.args, "use_fault_tolerance", False)
        patience = float(getattr(self.args, "rollout_timeout", None) or 0.0) if replaced else 0.0
        return EngineClient(engine_url(self.args), patience=patience)

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Slots of the running event loop, `slots_of` in number."""
        slots = asyncio.Semaphore(slots_of(self.args))
        return self._semaphores.setdefault(asyncio.get_running_loop(), slots)

    def reset(self) -> None:
        """Forget an abort: a new step begins."""
        self.aborted = False


def base_sampling_params(args: Any) -> dict[str, Any]:
    """Sampling parameters of training rollouts; what is unset is left to the engine."""
    params = {
        "temperature": getattr(args, "rollout_temperature", None),
        "top_p": getattr(args, "rollout_top_p", None),
        "top_k": getattr(args, "rollout_top_k", None),
        "max_new_tokens": getattr(args, "rollout_max_response_len", None),
        "stop": getattr(args, "rollout_stop", None),
        "stop_token_ids": getattr(args, "rollout_stop_token_ids", None),
        "skip_special_tokens": getattr(args, "rollout_skip_special_tokens", None),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    return {name: value for name, value in params.items() if value is not None}


def slots_of(args: Any) -> int:
    """Rollouts that may ask the engines at once: ``--sglang-server-concurrency`` for each engine.

    `args.rollout_num_engines` is known once the manager is connected; one address alone is one engine.
    """
    of_one = int(getattr(args, "sglang_server_concurrency", None) or SLOTS_OF_ONE)
    return of_one * int(getattr(args, "rollout_num_engines", None) or 1)


def engine_url(args: Any) -> str:
    """Base URL of the default engine or router.

    Raises:
        ConfigError: args holds no address.
    """
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not host or not port:
        raise ConfigError(
            "no engine address is known", place="args.sglang_router_ip, args.sglang_router_port"
        )
    return f"http://{host}:{port}"


def _values(args: Any) -> tuple[Any, ...]:
    return tuple(getattr(args, name, None) for name in _BUILT_FROM)
