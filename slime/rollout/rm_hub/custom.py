"""Calling the user's reward hook: async on the event loop, a plain function on a thread of its own.

Invariant: the caller gets a value or an error by the deadline, whatever the hook does; only an async hook
that blocks can hold the event loop. A thread past its deadline is told to stop and left behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import threading
from typing import Any

from slime.errors import HookError, RewardError, SlimeError
from slime.rollout.hooks import Hook, flag_name, hook_name, load_hook, run_hook
from slime.rollout.rm_hub.verdict import failure_kind
from slime.rollout.tasks import in_thread

logger = logging.getLogger(__name__)
FLAG = flag_name("custom_rm_path")


async def custom_reward(
    path: str, args: Any, target: Any, *, seconds: float, place: str, kwargs: dict[str, Any]
) -> Any:
    """The raw value of the reward hook at `path`, for a sample or a list of samples.

    Raises:
        HookError: the hook does not import or cannot take the call.
        RewardError: it raised, or gave no value within `seconds`.
    """
    hook = load_hook(path, "custom_rm_path")
    try:
        async with asyncio.timeout(seconds):
            return await _called(hook, (args, target), kwargs)
    except TimeoutError as error:
        raise RewardError(
            f"{path} did not finish within {seconds:g} s",
            place=place,
            remedy="raise --reward-timeout",
            reason="timeout",
        ) from error
    except SlimeError as error:
        if isinstance(error, RewardError):
            raise
        raise RewardError(f"{path}: {error}", place=place, reason=failure_kind(error)) from error


async def _called(hook: Hook, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_async(hook):
        return await run_hook(hook, FLAG, arguments, kwargs)
    call = _ThreadCall(hook, arguments, kwargs)
    try:
        value = await in_thread(call.run)
        return await value if inspect.isawaitable(value) else value
    except asyncio.CancelledError:
        call.stop()
        raise
    except SlimeError:
        raise
    except (Exception, SystemExit) as error:
        raise HookError(f"{hook_name(hook)} raised {type(error).__name__}: {error}", place=FLAG) from error


def _is_async(hook: Hook) -> bool:
    call = getattr(hook, "__call__", hook)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(call)


class _Stopped(BaseException):
    """Raised inside a hook whose deadline has passed."""


class _ThreadCall:
    """One call on a thread; it can be told to stop, which Python code obeys at its next instruction."""

    def __init__(self, hook: Hook, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hook = hook
        self._arguments = arguments
        self._kwargs = kwargs
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._stopped = False

    def run(self) -> Any:
        """The hook's value; runs on the thread."""
        with self._lock:
            if self._stopped:  # before it began
                return None
            self._thread = threading.get_ident()
        try:
            return self._hook(*self._arguments, **self._kwargs)
        finally:
            with self._lock:
                self._thread = None

    def stop(self) -> None:
        """Interrupt the thread, if the hook still runs; a hook that has not begun never does."""
        with self._lock:
            self._stopped = True
            if self._thread is None:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(_Stopped)
            )
        logger.error("%s is past its deadline; its thread was told to stop", hook_name(self._hook))
