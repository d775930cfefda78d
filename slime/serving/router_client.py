"""Client of a router's REST interface: which workers it has, more of them, fewer of them.

Invariant: `add` returns when the worker is listed and healthy, `remove` when it is listed no more; a worker
that did not come in time is withdrawn; each wait has a deadline and names what it waited for. sglang-router
and ours are driven alike. Knows no processes.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime.errors import DeadlineError, EngineError, EngineUnavailableError
from slime.serving.endpoint import WorkerType

_POLL_SECONDS = 0.1
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Proxies of the environment are for others' servers."""


class _UnknownWorkerError(EngineError):
    """The router knows no worker of that id."""


@dataclass(frozen=True, kw_only=True)
class RouterWorker:
    """A worker as its router lists it.

    Attributes:
        id: the router's name for it.
        load: requests in flight, as far as the router counts them.
    """

    id: str
    url: str
    worker_type: str
    is_healthy: bool
    load: int


@dataclass(frozen=True, kw_only=True)
class Registration:
    """An engine as it is told to a router.

    Attributes:
        bootstrap_port: where a prefilling engine hands its keys over.
    """

    url: str
    worker_type: WorkerType = "regular"
    bootstrap_port: int | None = None


class RouterClient:
    """Talks to the router at `url`.

    Args:
        timeout: deadline of one call in seconds.
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._added: dict[str, str | None] = {}

    def has_added(self, url: str) -> bool:
        """Whether the worker at `url` was registered here: it was not there before."""
        return url.rstrip("/") in self._added

    def workers(self) -> tuple[RouterWorker, ...]:
        """All workers, healthy or not.

        Raises:
            EngineUnavailableError: the router does not answer.
            EngineError: it answers an error.
        """
        return tuple(
            RouterWorker(
                id=str(worker["id"]),
                url=str(worker["url"]).rstrip("/"),
                worker_type=str(worker.get("worker_type", "regular")),
                is_healthy=bool(worker.get("is_healthy", True)),
                load=int(worker.get("load") or 0),
            )
            for worker in self._call("GET", "/workers")["workers"]
        )

    def add(
        self,
        url: str,
        *,
        worker_type: WorkerType = "regular",
        bootstrap_port: int | None = None,
        timeout: float = 120.0,
    ) -> RouterWorker:
        """As `register`."""
        worker = Registration(url=url, worker_type=worker_type, bootstrap_port=bootstrap_port)
        return self.register(worker, timeout=timeout)

    def register(self, engine: Registration, *, timeout: float = 120.0) -> RouterWorker:
        """Register an engine, and wait until requests go there.

        One that is registered already, after a restart at the same address for example, is waited for alike.
        One that does not come is withdrawn, so that what listens there later gets no requests by it.
        (sglang-router 0.3.2 takes that back for workers that it lists already, and goes on with others.)

        Raises:
            DeadlineError: it did not become a healthy worker within `timeout` seconds.
            EngineUnavailableError: nothing listens there any more.
        """
        url = engine.url
        body: dict[str, Any] = {"url": url, "worker_type": engine.worker_type}
        if engine.bootstrap_port is not None:
            body["bootstrap_port"] = engine.bootstrap_port
        if self._find(url) is None:
            answer = self._call("POST", "/workers", body)
            self._added[url.rstrip("/")] = answer.get("worker_id") if isinstance(answer, dict) else None
        try:
            return self._healthy(url, timeout)
        except (DeadlineError, EngineUnavailableError):
            self._withdraw(url)
            raise

    def remove(self, url: str, *, timeout: float = 30.0) -> bool:
        """Let no more requests go to the engine at `url`; False where it was no worker, nor to become one.

        Raises:
            DeadlineError: it is still listed after `timeout` seconds.
        """
        deadline, worker = time.monotonic() + timeout, self._find(url)
        if worker is None:
            return self._withdraw(url)
        self._delete(worker.id)
        while time.monotonic() < deadline:
            if self._find(url) is None:
                self._added.pop(url.rstrip("/"), None)
                return True
            time.sleep(_POLL_SECONDS)
        raise DeadlineError(f"the router {self.url} still lists {url} after {timeout:g} s", place=url)

    def _healthy(self, url: str, timeout: float) -> RouterWorker:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            worker = self._find(url)
            if worker is not None and worker.is_healthy:
                return worker
            if _is_gone(url):
                raise EngineUnavailableError("nothing listens there any more", place=url)
            time.sleep(_POLL_SECONDS)
        raise DeadlineError(
            f"the router {self.url} did not find {url} healthy within {timeout:g} s", place=url
        )

    def _withdraw(self, url: str) -> bool:
        """Take back what was registered here, listed or not yet; False where there is nothing."""
        worker_id = self._added.get(url.rstrip("/"))
        is_withdrawn = worker_id is not None and self._delete(worker_id)
        self._added.pop(url.rstrip("/"), None)
        return is_withdrawn

    def _delete(self, worker_id: str) -> bool:
        try:
            self._call("DELETE", f"/workers/{worker_id}")
        except _UnknownWorkerError:
            return False
        return True

    def health(self) -> bool:
        """Whether the router itself answers."""
        try:
            self._call("GET", "/health")
        except EngineError:
            return False
        return True

    def _find(self, url: str) -> RouterWorker | None:
        wanted = url.rstrip("/")
        return next((worker for worker in self.workers() if worker.url == wanted), None)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        place = f"router {self.url}"
        try:
            with _OPENER.open(request, timeout=self._timeout) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            kind = _UnknownWorkerError if error.code == 404 else EngineError
            raise kind(f"{method} {path} answered {error.code}: {text}", place=place) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnavailableError(f"{method} {path}: {error}", place=place) from error
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")


def _is_gone(url: str) -> bool:
    """Whether connections to a server are refused; one that is only slow to accept them is there."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
