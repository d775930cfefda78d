"""Sandboxes of the three kinds, booted a few at a time and tried again.

Knows how each kind finds its image; nothing of what runs in it.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from examples.coding_agent_rl.settings import Settings
from slime.agent.sandbox import (
    DockerSandbox,
    E2BSandbox,
    LocalSandbox,
    Sandbox,
    SandboxError,
    SandboxUnavailableError,
)


@asynccontextmanager
async def booted(settings: Settings, image: str, workdir: str) -> AsyncIterator[Sandbox]:
    """A sandbox that started from `image`; it is gone after the block.

    Raises:
        SandboxError: it could not be made, in all tries.
    """
    box = await _boot(settings, image, workdir)
    try:
        yield box
    finally:
        await box.__aexit__(None, None, None)


def workdir_in(box: Sandbox, wanted: str) -> str:
    """Where the work tree is: a local box without namespaces has it in a place of its own."""
    return box.workdir if isinstance(box, LocalSandbox) else wanted


async def _boot(settings: Settings, image: str, workdir: str) -> Sandbox:
    slots = _slots(asyncio.get_running_loop(), settings.boot_concurrency)
    for attempt in range(settings.boot_retries):
        try:
            async with slots:
                return await _make(settings, image, workdir).__aenter__()
        except SandboxUnavailableError:
            raise
        except SandboxError:
            await asyncio.sleep(random.uniform(0.5, 1.0) * 2**attempt)
    async with slots:
        return await _make(settings, image, workdir).__aenter__()


def _make(settings: Settings, image: str, workdir: str) -> Sandbox:
    if settings.sandbox == "docker":
        return DockerSandbox(image, workdir=workdir)
    if settings.sandbox == "e2b":
        return E2BSandbox(image, workdir=workdir)
    binds = {settings.agent_prefix: settings.agent_prefix} if settings.agent_prefix else {}
    return LocalSandbox(image, workdir=workdir, binds=binds)


@functools.lru_cache(maxsize=4)
def _slots(loop: asyncio.AbstractEventLoop, size: int) -> asyncio.Semaphore:
    """Boots at a time; a semaphore belongs to one loop."""
    return asyncio.Semaphore(size)
