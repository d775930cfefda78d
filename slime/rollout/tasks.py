"""Running user code under a deadline: each call in a task of its own, which is cancelled, then abandoned.

Invariant: a caller of `bounded` gets control back within deadline + grace, whatever the code does with
cancellation; only code that blocks the event loop itself can hold it (the watchdog reports that).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from slime.errors import DeadlineError, HookError

T = TypeVar("T")
logger = logging.getLogger(__name__)
GRACE_SECONDS = 5.0
"""How long cancelled code may clean up. Below 10 s, the time in which stuck work must be reported."""

ROLLOUT_SECONDS = 1800.0

_abandoned: dict[asyncio.Task[Any], str] = {}


def rollout_seconds(args: Any) -> float:
    """``--rollout-timeout``: the deadline of a rollout, and of hooks that see whole groups."""
    return float(getattr(args, "rollout_timeout", None) or ROLLOUT_SECONDS)


async def bounded(
    work: Coroutine[Any, Any, T], *, seconds: float, what: str, place: str, grace: float = GRACE_SECONDS
) -> T:
    """The value of `work`, if it comes within `seconds`.

    Args:
        what: name of the work, e.g. ``generate (my.module.hook)``.
        place: for whom, e.g. ``rollout 12``.
        grace: how long the work may take to end once it is cancelled.

    Raises:
        DeadlineError: it took longer, and was cancelled.
        HookError: it raised a cancellation of its own, or tried to end the process.
    """
    task = asyncio.create_task(_contained(work, what, place))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task, f"{what}, {place}", grace)
        raise
    if not done:
        ended = await _stop(task, f"{what}, {place}", grace)
        raise DeadlineError(
            f"{what} took longer than {seconds:g} s and was cancelled"
            + ("" if ended else " (it ignores that)"),
            place=place,
        )
    if task.cancelled():
        raise HookError(f"{what} raised CancelledError although nobody cancelled it", place=place)
    return task.result()


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The values of all, run at once. On the first error the others are cancelled and waited for."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """The value of a function that may block. A caller that is cancelled leaves the thread behind.

    Raises:
        BaseException: whatever the function raises.
    """
    outcome: concurrent.futures.Future[tuple[T | None, BaseException | None]] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.set_result((context.run(function, *args), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's task
            outcome.set_result((None, error))

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=work, name="slime-hook", daemon=True).start()
    value, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return cast("T", value)


def abandoned_work() -> list[str]:
    """Names of tasks that ignored their cancellation and still run."""
    return list(_abandoned.values())


async def _contained(work: Coroutine[Any, Any, T], what: str, place: str) -> T:
    """`work`, except that it cannot end the event loop by ``sys.exit()``."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise HookError(f"{what} raised {type(error).__name__}", place=place) from error


async def _stop(task: asyncio.Task[Any], name: str, grace: float) -> bool:
    """Cancel, wait for the end at most `grace` seconds, even if cancelled meanwhile; True if it ended."""
    task.cancel()
    task.add_done_callback(_forget)
    loop, cancelled = asyncio.get_running_loop(), None
    end = loop.time() + grace
    while not task.done() and (left := end - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        _abandoned[task] = name
        logger.error("%s ignores its cancellation; left behind after %g s", name, grace)
    if cancelled is not None:
        raise cancelled
    return task.done()


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.pop(task, None)
    if not task.cancelled():
        task.exception()  # the caller has long gone; an unread exception would be logged by asyncio as lost
