"""The routers of a run: one before each model that has several engines, or an existing one.

Invariant: a model is asked at one address from start to end, whatever becomes of its router or its engines;
a router that was there before is left as it was. Runs in the driver's process; knows engines by their
endpoints.
"""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlsplit

from slime.config import Config
from slime.errors import ActorDiedError, SlimeError
from slime.serving.endpoint import EngineEndpoint, EngineKind
from slime.serving.router import RouterProcess, plan_router, start_router
from slime.serving.router_client import Registration, RouterClient
from slime.serving.topology import ServedModel, Topology

LEAVE_SECONDS = 10.0
"""What a router that was there before gets to let the engines of a run go."""


class Routers:
    """Routers by model.

    Args:
        host: under which other machines of the cluster reach this one; None on one machine.
        restarts: how often routers that died are started again; None ends the run instead.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        kind: EngineKind,
        logs: Path,
        *,
        host: str | None,
        restarts: int | None,
    ) -> None:
        self._config, self._logs, self._host = config, logs, host
        self._restarts = restarts
        self._default = topology.default.name
        listens = "127.0.0.1" if host is None else "0.0.0.0"
        self._plans = {
            model.name: plan_router(model, config.serving, config.router, engine=kind, host=listens)
            for model in topology.models
            if self._needs_router(model)
        }
        self._processes: dict[str, RouterProcess] = {}
        self._clients: dict[str, RouterClient] = {}
        self._members: dict[str, dict[str, Registration]] = {model.name: {} for model in topology.models}
        self._alone: dict[str, str] = {}
        self._found: set[str] = set()
        if config.serving.sglang_router_ip is not None:
            address = f"{config.serving.sglang_router_ip}:{config.serving.sglang_router_port}"
            self._clients[self._default] = RouterClient(f"http://{address}", timeout=LEAVE_SECONDS)

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Host and port where each model is asked, the default one first."""
        return {model: host_and_port(self._url(model)) for model in self._members}

    def add(self, endpoint: EngineEndpoint, bootstrap_port: int | None = None) -> None:
        """Let requests go to an engine, from `start` on or at once.

        Raises:
            DeadlineError: the router does not find it healthy.
        """
        if endpoint.worker_type == "encoder":
            return
        worker = Registration(
            url=endpoint.url, worker_type=endpoint.worker_type, bootstrap_port=bootstrap_port
        )
        self._members[endpoint.model][endpoint.name] = worker
        self._alone[endpoint.model] = endpoint.url
        client = self._living(endpoint.model)
        if client is not None:
            client.register(worker)
            if endpoint.is_external and not client.has_added(endpoint.url):
                self._found.add(endpoint.url)

    def remove(self, endpoint: EngineEndpoint) -> None:
        """Let no more requests go to an engine.

        Raises:
            EngineError: the router does not let it go.
        """
        self._members[endpoint.model].pop(endpoint.name, None)
        client = self._living(endpoint.model)
        if client is not None:
            client.remove(endpoint.url)

    def start(self) -> None:
        """Start what is to be started; returns when all send requests to the engines that were added.

        Raises:
            EngineError: one did not start.
        """
        for model in self._plans:
            self._start(model, self._config.serving.sglang_router_port if model == self._default else None)

    @property
    def has_died(self) -> bool:
        """Whether a router is dead that `poll` will look after."""
        return any(not process.is_alive for process in self._processes.values())

    def poll(self) -> list[str]:
        """Look after the routers; returns what was done about those that died.

        Raises:
            ActorDiedError: one died, and is not to be started again, or not so often.
        """
        dead = [(model, process) for model, process in self._processes.items() if not process.is_alive]
        return [self._revive(model, process) for model, process in dead]

    def leave(self) -> list[str]:
        """Take the engines from routers that were there before, but those that they had already.

        Returns:
            What could not be done.
        """
        there = [model for model in self._clients if model not in self._processes]
        return [text for model in there for text in self._leave(model)]

    def close(self) -> None:
        """End those that were started here."""
        for process in self._processes.values():
            process.stop()

    def _leave(self, model: str) -> list[str]:
        client, end = self._clients[model], time.monotonic() + LEAVE_SECONDS
        for worker in self._members[model].values():
            if worker.url in self._found:
                continue
            try:
                client.remove(worker.url, timeout=end - time.monotonic())
            except SlimeError as error:
                return [f"the router {client.url} may still list engines of this run: {error.message}"]
        return []

    def _living(self, model: str) -> RouterClient | None:
        """The router to be told of engines. A dead one is not: its successor begins with `_members`."""
        process = self._processes.get(model)
        return self._clients.get(model) if process is None or process.is_alive else None

    def _revive(self, model: str, process: RouterProcess) -> str:
        how = process.wait_for_exit()
        if not self._restarts:
            raise ActorDiedError(how, place=f"router of {model}")
        self._restarts -= 1
        self._start(model, urlsplit(process.url).port)
        return f"the router of {model} died and was started again: {how.splitlines()[0]}"

    def _start(self, model: str, port: int | None) -> None:
        file, workers = self._logs / f"router_{model}.log", [*self._members[model].values()]
        process = start_router(self._plans[model], file, workers=workers, port=port)
        self._processes[model], self._clients[model] = process, process.client

    def _url(self, model: str) -> str:
        if model not in self._clients:
            return self._alone[model]
        url = self._clients[model].url
        if self._host is None or model not in self._processes:
            return url
        return f"http://{self._host}:{urlsplit(url).port}"

    def _needs_router(self, model: ServedModel) -> bool:
        serving, is_default = self._config.serving, model.name == self._default
        if is_default and serving.sglang_router_ip is not None:
            return False
        wanted = bool(self._config.router) or (is_default and serving.sglang_router_port is not None)
        # An engine that replaces another answers before it has the weights, and only a router keeps it apart.
        replaces = self._restarts is not None
        return wanted or replaces or model.is_disaggregated or model.num_engines != 1


def host_and_port(url: str) -> tuple[str, int]:
    """Of a base URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port
