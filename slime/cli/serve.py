"""`slime serve MODEL`: the embedded engine behind SGLang's HTTP protocol, in the foreground.

With ``--config`` it is a whole topology that is served (serve_topology.py).

Invariant: the port is bound before the model is loaded, so a taken one costs nothing; a signal ends the
process cleanly. Knows nothing of training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.parse import parse_section
from slime.config.sections import EngineConfig
from slime.errors import ConfigError

if TYPE_CHECKING:
    from slime.serving.embedded.core import EngineCore

DEFAULT_PORT = 30000
_SHUTDOWN_SECONDS = 0.5
_FURTHER = {
    "model": "model folder in Hugging Face format",
    "--ready-file": "file that gets the port as JSON once the engine is ready",
}


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. With ``--config``, all that a topology says.

    Raises:
        ConfigError: a flag is wrong, or the port taken.
        ModelError: the folder is unusable, or the architecture not supported.
    """
    if any(word == "--config" or word.startswith("--config=") for word in argv):
        from slime.cli import serve_topology

        return serve_topology.main(argv)
    config, rest = parse_section(EngineConfig, argv, "slime serve", _FURTHER)
    try:
        with bind(config.host, DEFAULT_PORT if config.port is None else config.port) as sock:
            _serve(rest["model"], config, sock, rest.get("ready_file"))
    except KeyboardInterrupt:
        return 130
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket.

    Raises:
        ConfigError: the port is taken, or the host is not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"port {port} on {host} is taken"
            if taken
            else f"cannot listen on {host}:{port}: {error.strerror}",
            place="--port" if taken else "--host",
            remedy="choose another with --port, or take any free one with --port 0" if taken else None,
        ) from error
    return sock


def _serve(model: str, config: EngineConfig, sock: socket.socket, ready_file: str | None) -> None:
    from slime.serving.embedded.engine import Engine

    config = dataclasses.replace(config, port=sock.getsockname()[1])
    asyncio.run(serve_until_signal(Engine(model, config), config, sock, ready_file))


async def serve_until_signal(
    engine: EngineCore, config: EngineConfig, sock: socket.socket, ready_file: str | None
) -> None:
    """Start the engine, serve it on a bound socket, say that it is ready, and end at SIGTERM or SIGINT."""
    from slime.serving.embedded.server import EngineServer

    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    server = EngineServer(engine, config)
    await asyncio.to_thread(engine.start)
    await server.start(sock)
    _announce(sock, ready_file)
    await end.wait()
    await server.stop()
    await _shut_down(engine)


async def _shut_down(engine: EngineCore) -> None:
    """End the engine, or the process where a long forward pass holds it up: that cannot be interrupted."""
    thread = threading.Thread(target=engine.shutdown, daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, _SHUTDOWN_SECONDS)
    if thread.is_alive():
        os._exit(0)


def _announce(sock: socket.socket, ready_file: str | None) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if ready_file is not None:
        partial = Path(f"{ready_file}.partial")
        partial.write_text(json.dumps({"port": port, "pid": os.getpid()}), encoding="utf-8")
        partial.replace(ready_file)
    print(f"slime serve: ready on http://{shown}:{port}", flush=True)
