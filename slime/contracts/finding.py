"""What comes of a contract: a `Finding`; and how a contract says that it is broken or has nothing to look at.

A contract is a function of one subject (a hook and what to call it with) whose docstring states the law. It
returns a note or nothing when the law holds, raises `ContractError` when it does not, and
`NotApplicableError` when there is nothing that could show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slime.errors import HookError, SlimeError

Verdict = Literal["passed", "failed", "not applicable"]
Contract: TypeAlias = Callable[[Any], str | None]
"""(subject) -> a note for the reader, or None."""


class ContractError(HookError):
    """A hook breaks a contract."""


class NotApplicableError(SlimeError):
    """There is nothing by which this contract could be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One contract of one hook.

    Attributes:
        hook: flag and path, e.g. ``--custom-rm-path my.module.reward``.
        contract: its name in words.
        law: what it demands.
        message: a note where it passed, what was expected and found where it failed, else why it is not
        judged. remedy: how to mend it.
        seconds: how long it took.
    """

    hook: str
    contract: str
    law: str
    verdict: Verdict
    message: str = ""
    remedy: str = ""
    seconds: float = 0.0


def broken(expected: str, found: str, remedy: str) -> ContractError:
    """The error of a contract that does not hold."""
    return ContractError(f"expected {expected}; found {found}", remedy=remedy)


def judge(contract: Contract, subject: Any, hook: str) -> Finding:
    """Try one contract on a hook. What slime itself raises about the hook breaks the contract too."""
    started = time.monotonic()
    verdict: Verdict = "passed"
    message, remedy = "", ""
    try:
        message = contract(subject) or ""
    except NotApplicableError as error:
        verdict, message = "not applicable", error.message
    except Exception as error:  # noqa: BLE001 - boundary: user code is called here, as in a rollout task
        verdict, message, remedy = "failed", _message(error), getattr(error, "remedy", None) or _TRACE
    return Finding(
        hook=hook,
        contract=name_of(contract),
        law=law_of(contract),
        verdict=verdict,
        message=message,
        remedy=remedy,
        seconds=time.monotonic() - started,
    )


def name_of(contract: Contract) -> str:
    """``keeps_the_ids`` -> ``keeps the ids``."""
    return contract.__name__.replace("_", " ")


def law_of(contract: Contract) -> str:
    """The first paragraph of the docstring."""
    return " ".join((contract.__doc__ or "").partition("\n\n")[0].split())


_TRACE = "call the hook by itself, with the arguments that the message names, and mend what it raises"


def _message(error: Exception) -> str:
    if isinstance(error, ContractError):
        return error.message
    text = f"{error.place}: {error.message}" if isinstance(error, SlimeError) and error.place else str(error)
    return f"{type(error).__name__}: {text}"
