"""Calls of users' functions that see whole steps: each is named in the registry and ends at a deadline.

Invariant: while such a function runs, `IN_FLIGHT` has an entry with its flag and path; whoever called it gets
control back within the deadline and the grace of `bounded`, whatever the function does.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from slime.rollout.inflight import IN_FLIGHT
from slime.rollout.loop import background_loop
from slime.rollout.tasks import bounded, in_thread, rollout_seconds
from slime.utils.user_function import UserFunction

T = TypeVar("T")
LOOP = "slime-hooks"
"""Not the loop of rollouts: a hook's deadline holds while that is blocked, or waits itself."""


async def watched(work: Coroutine[Any, Any, T], *, seconds: float, what: str, place: str) -> T:
    """The value of `work`, with an entry in the registry.

    Raises:
        As `bounded`.
    """
    with IN_FLIGHT.track(what, place, seconds):
        return await bounded(work, seconds=seconds, what=what, place=place)


def call_in_time(function: Callable[..., T], *values: Any, seconds: float, what: str, place: str) -> T:
    """The value of a function that may block; the caller waits, also where it is an event loop.

    Args:
        what: flag and path, e.g. ``--data-source-path (my.module.Source)``.
        place: what it is called for, e.g. ``rollout step 3``.

    Raises:
        DeadlineError: it took longer; its thread is left behind.
        HookError: it tried to end the process.
        CancelledError: `cancel_calls` gave it up.
        Exception: what it raised.
    """
    work = watched(in_thread(function, *values), seconds=seconds, what=what, place=place)
    return background_loop(LOOP).run(work)


def call_step_hook(hook: UserFunction, args: Any, *values: Any, place: str) -> Any:
    """The answer of a hook to `values`, by ``--rollout-timeout``, as for all hooks that see groups.

    Raises:
        As `call_in_time`, and HookError for what the hook raised.
    """
    return call_in_time(hook, *values, seconds=rollout_seconds(args), what=hook.name, place=place)


def cancel_calls() -> None:
    """Give up what `call_in_time` waits for."""
    background_loop(LOOP).cancel()
