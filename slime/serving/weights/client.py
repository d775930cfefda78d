"""`WeightClient`: what a weight update asks of one engine, by SGLang's native HTTP, and the `Deadline` of it.

Invariant: every call ends by the deadline, is made once and never retried (a broadcast is not repeatable),
and fails with an error that names engine and call. Synchronous: an update computes between calls, and
belongs to no event loop. Knows nothing of how weights travel.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from slime.errors import (
    CapabilityError,
    DeadlineError,
    EngineError,
    EngineRequestError,
    EngineUnavailableError,
)
from slime.utils.capabilities import ROUTES, Capabilities, capabilities_of
from slime.utils.engine_answers import TransientError, as_object, check_succeeded, checked_answer

if TYPE_CHECKING:
    from slime.serving.endpoint import EngineEndpoint
    from slime.serving.weights.sync import UpdatePause

CONNECT_SECONDS = 10.0
FLUSH_SECONDS = 30.0
FLUSH_PAUSE_SECONDS = 0.05
FROM_DISK = "/update_weights_from_disk"
LEAST_SECONDS = 0.01
"""Of a timeout: to gloo, 0 is no limit."""
_NOT_FOUND = 404


class Deadline:
    """When a piece of work has to be done."""

    def __init__(self, seconds: float, what: str) -> None:
        """`what` names the work and the flag that sets `seconds`."""
        self._seconds, self._what = seconds, what
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, above 0.

        Raises:
            DeadlineError: none are.
        """
        self.check()
        return max(self.left, LEAST_SECONDS)

    @property
    def left(self) -> float:
        """Seconds left; 0 where it has passed."""
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """
        Raises:
            DeadlineError: it has passed.
        """
        if not self.left:
            raise self.passed("was not done")

    def passed(self, what: str) -> DeadlineError:
        """The error that says so."""
        return DeadlineError(f"{what} within {self._seconds:g} s", place=self._what)


@dataclass(frozen=True)
class WeightClient:
    """One engine during one update."""

    endpoint: EngineEndpoint
    deadline: Deadline
    known: dict[str, Capabilities] = field(default_factory=dict, compare=False)

    @property
    def able(self) -> Capabilities:
        """What the engine can do; asked once, and kept in `known` by its name."""
        if self.name not in self.known:
            routes = frozenset(r for r in ROUTES if self._request("OPTIONS", r, None)[0] != _NOT_FOUND)
            self.known[self.name] = capabilities_of(self.get("/server_info"), routes, self.endpoint.url)
        return self.known[self.name]

    @property
    def name(self) -> str:
        """The engine's name in the run."""
        return self.endpoint.name

    def post_weights(self, path: str, body: Mapping[str, Any]) -> Any:
        """`post` of weights of the policy, which a draft model of its own does not get.

        Draft layers inside the policy's checkpoint share its weights and get them.

        Raises:
            EngineError: as `post`.
            CapabilityError: the route would load the policy into the draft model.
        """
        if not self.able.own_draft:
            return self.post(path, body)
        if path == FROM_DISK:
            raise CapabilityError(
                "an update from disk would load the policy into the draft model too",
                place=self.endpoint.url,
                remedy="--update-weight-transport tensor or nccl; or no draft model of its own",
            )
        target = {"selector": "target"} if self.able.weight_sessions else {"disable_draft_model": True}
        return self.post(path, {**body, **target})

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """One call; an answer with ``success: false`` is a failure.

        Raises:
            EngineRequestError: 4xx. EngineError: 5xx, or no success. EngineUnavailableError: no answer.
            DeadlineError: no answer in time.
        """
        answer = self._checked(path, *self._request("POST", path, body))
        check_succeeded([answer], self.endpoint.url + path)
        return answer

    def get(self, path: str) -> dict[str, Any]:
        """A JSON object."""
        return as_object(self._checked(path, *self._request("GET", path, None)), path)

    def check_pause(self, mode: UpdatePause) -> None:
        """
        Raises:
            CapabilityError: it would not survive an update in this mode.
        """
        self.able.require_pause(mode, needed_by="the update of weights", place=self.endpoint.url)

    def pause(self, mode: UpdatePause) -> None:
        """Stop generating; raises as `check_pause`."""
        self.check_pause(mode)
        self.post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Go on generating."""
        self.post("/continue_generation", {})

    def flush(self) -> None:
        """Forget cached prefixes, once the requests that a pause ended or took back are gone from the cache.

        Raises:
            EngineRequestError: they are not within `FLUSH_SECONDS`.
        """
        end = time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                self.post("/flush_cache", {})
                return
            except EngineRequestError:
                if time.monotonic() > end:
                    raise
            time.sleep(FLUSH_PAUSE_SECONDS)

    @property
    def version(self) -> str:
        """The version of the weights that the engine says it has."""
        return str(self.get("/model_info").get("weight_version"))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        url, remaining = urlsplit(self.endpoint.url + path), self.deadline.remaining
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=min(CONNECT_SECONDS, remaining))
        try:
            connection.connect()
            connection.sock.settimeout(remaining)
            data = None if body is None else orjson.dumps(body)
            connection.request(method, url.path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except TimeoutError as error:
            raise self.deadline.passed(f"{self.endpoint.url}{path} did not answer") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnavailableError(
                f"{type(error).__name__}: {error}", place=self.endpoint.url + path
            ) from error
        finally:
            connection.close()

    def _checked(self, path: str, status: int, content: bytes) -> Any:
        try:
            return checked_answer(status, content, self.endpoint.url + path)
        except TransientError as error:
            raise EngineError(str(error), place=self.endpoint.url + path) from error
