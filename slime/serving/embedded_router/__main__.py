"""Runs the router in the foreground: ``python -m slime.serving.embedded_router SETTINGS_JSON READY_FILE``.

The file gets its port once it listens; SIGTERM and SIGINT end it cleanly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.config.router_section import RouterSettings, router_settings
from slime.errors import SlimeError
from slime.serving.embedded_router.server import RouterServer


def main(words: Sequence[str]) -> int:
    """Serve until a signal comes; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = router_settings(json.loads(words[0]))
        with socket.create_server((settings.host, settings.port)) as sock:
            asyncio.run(_serve(settings, sock, Path(words[1])))
    except (SlimeError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: RouterSettings, sock: socket.socket, ready_file: Path) -> None:
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    server = RouterServer(settings)
    await server.start(sock)
    partial = ready_file.with_suffix(".partial")
    partial.write_text(str(sock.getsockname()[1]), encoding="utf-8")
    partial.replace(ready_file)
    await end.wait()
    await server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
