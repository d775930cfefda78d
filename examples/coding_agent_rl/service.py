"""The adapter: one a process, started at first use on a thread of its own; and how a sandbox reaches it.

A local sandbox has no network: a listening socket on its own loopback is passed out and served here. Docker
and E2B reach the adapter's port. Knows the agent's protocol; nothing of tasks and rewards.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from examples.coding_agent_rl.settings import Settings
from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.agent.harness import CLAUDE_CODE
from slime.agent.sandbox import LocalSandbox, Sandbox
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.processing_utils import load_tokenizer


@dataclass(frozen=True)
class Service:
    """A running adapter."""

    adapter: BaseAdapter
    handle: AppHandle
    public_host: str | None

    @asynccontextmanager
    async def reachable(self, box: Sandbox) -> AsyncIterator[str]:
        """The adapter's URL inside the sandbox."""
        if not isinstance(box, LocalSandbox):
            yield f"http://{self.public_host}:{self.handle.port}"
            return
        listener = await box.listen()
        site = web.SockSite(self.handle.runner, listener)
        await self._there(site.start())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await self._there(site.stop())

    async def _there(self, work: Coroutine[Any, Any, None]) -> None:
        """Run on the adapter's loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.handle.loop))


def service_for(args: Any, settings: Settings) -> Service:
    """The service of this process for a run's model and engine."""
    parsers = tuple(getattr(args, f"sglang_{kind}_parser", None) for kind in ("tool_call", "reasoning"))
    replays = bool(getattr(args, "use_rollout_routing_replay", False))
    return _service(settings, args.hf_checkpoint, get_model_url(args, endpoint=""), parsers, replays)


@functools.cache
def _service(
    settings: Settings,
    model: str,
    engine_url: str,
    parsers: tuple[str | None, str | None],
    replays_routes: bool,
) -> Service:
    kind = AnthropicAdapter if settings.agent == CLAUDE_CODE.name else OpenAIAdapter
    adapter = kind(
        tokenizer=load_tokenizer(model),
        sglang_url=engine_url,
        tool_parser=parsers[0],
        reasoning_parser=parsers[1],
        max_turns_per_sid=settings.max_turns,
        turn_cap_reply="final_turn",
        fork_threshold_tokens=settings.fork_threshold,
        return_routed_experts=replays_routes,
    )
    is_local = settings.sandbox == "local"
    host, port = ("127.0.0.1", 0) if is_local else (settings.bind_host, settings.port)
    handle = run_app_in_thread(adapter.app, host=host, port=port, thread_name="coding-agent-adapter")
    return Service(adapter, handle, settings.public_host)
