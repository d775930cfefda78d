"""The aiohttp session of an event loop: opened at the first request, closed with the loop.

Invariant: one a loop, without a limit on connections, so that it never holds back the rollouts that the slots
admit. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

_held: dict[
    asyncio.AbstractEventLoop,
    tuple[aiohttp.ClientSession, AsyncGenerator[aiohttp.ClientSession, None]],
] = {}


async def http_session() -> aiohttp.ClientSession:
    """The session of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _held:
        for closed in [other for other in _held if other.is_closed()]:
            del _held[closed]
        holder = _open_session()
        _held[loop] = (await anext(holder), holder)
    return _held[loop][0]


async def _open_session() -> AsyncGenerator[aiohttp.ClientSession, None]:
    """Suspended while the loop lives; the loop finishes its generators when it shuts down."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        yield session
