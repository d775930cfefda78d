"""`Crew`: the engines of one update, called all at once; one that fails is out of it, with the reason.

Invariant: an engine is either a member or in `failed`; a call that fails at one engine never stops the
others, and one that hangs never takes all of their time. Knows HTTP calls; knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import Any, TypeAlias

from slime.errors import CapabilityError, SlimeError
from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.client import LEAST_SECONDS, Deadline, WeightClient
from slime.utils.capabilities import Capabilities

Call: TypeAlias = Callable[[WeightClient], Any]


class Crew:
    """Engines that still take part.

    Attributes:
        deadline: of the whole update.
        failed: reason by engine name.
    """

    def __init__(
        self,
        endpoints: Sequence[EngineEndpoint],
        deadline: Deadline,
        known: dict[str, Capabilities] | None = None,
    ) -> None:
        """`known`: what engines can do, by name; what is asked now is added."""
        self.deadline = deadline
        self.failed: dict[str, str] = {}
        self._clients = [
            WeightClient(endpoint, deadline, known if known is not None else {}) for endpoint in endpoints
        ]
        self._threads = ThreadPoolExecutor(max(1, len(endpoints)), thread_name_prefix="slime-weights")

    @property
    def members(self) -> list[WeightClient]:
        """Engines that have not failed, in their order."""
        return [client for client in self._clients if client.name not in self.failed]

    @property
    def world_size(self) -> int:
        """Ranks of all members together."""
        return sum(client.endpoint.world_size for client in self.members)

    def each(self, step: str, call: Call) -> dict[str, Any]:
        """Call all members at once and wait; the results by engine name. `step` says what failed.

        Raises:
            CapabilityError: an engine cannot do it, and could not if it were started again.
        """
        return self.finish(self.start(step, call))

    def start(self, step: str, call: Call) -> Calls:
        """Begin the same."""
        started = {client: self._threads.submit(call, client) for client in self.members}
        return Calls(step, started)

    def finish(self, calls: Calls) -> dict[str, Any]:
        """Wait for calls that have begun; raises as `each`.

        Once one has succeeded, the others get half of the time that is left.
        """
        started = calls.futures.values()
        next((done for done in as_completed(started) if done.exception() is None), None)
        _, silent = wait(started, self.deadline.left / 2)
        results: dict[str, Any] = {}
        cannot: CapabilityError | None = None
        for client, future in calls.futures.items():
            if future in silent:
                self.drop(client, f"{calls.step}: {client.endpoint.url} did not answer, while others did")
                continue
            try:
                results[client.name] = future.result()
            except CapabilityError as error:
                cannot = error
            except SlimeError as error:
                self.drop(client, f"{calls.step}: {error.message}")
        if cannot is not None:
            raise cannot
        return results

    def share(self, step: str) -> float:
        """Seconds for one step: half of the time that is left; where none is, 0, and all members are out."""
        left = self.deadline.left
        for client in () if left else self.members:
            self.drop(client, f"{step}: {self.deadline.passed('was not reached').message}")
        return max(left / 2, LEAST_SECONDS) if left else 0.0

    def drop(self, client: WeightClient, reason: str) -> None:
        """Leave an engine out from now on; the first reason stays."""
        self.failed.setdefault(client.name, reason)

    def close(self) -> None:
        """Give up the threads."""
        self._threads.shutdown(wait=False)


class Calls:
    """One call on its way to several engines."""

    def __init__(self, step: str, futures: dict[WeightClient, Future[Any]]) -> None:
        self.step, self.futures = step, futures
