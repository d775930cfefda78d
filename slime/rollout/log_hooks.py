"""The users' logging functions of rollouts and evaluations: who logs, they or slime.

Invariant: slime leaves the logging to a hook only where that says True; a failure or another answer is told
by name, never taken for one of the two.
"""

from __future__ import annotations

import inspect
from typing import Any

from slime.rollout.hook_calls import call_step_hook
from slime.rollout.hooks import flag_name, load_hook
from slime.utils.user_function import UserFunction

ROLLOUTS = "custom_rollout_log_function_path"
EVALUATIONS = "custom_eval_rollout_log_function_path"


def has_logged(args: Any, dest: str, *values: Any) -> bool:
    """Call the logging hook of a flag with `values`; False where there is none.

    Args:
        dest: `ROLLOUTS` or `EVALUATIONS`.

    Raises:
        HookError: it raised, or returned something else than True, False or None (which means False).
        DeadlineError: it took longer than ``--rollout-timeout``.
    """
    path = getattr(args, dest, None)
    if not path:
        return False
    hook = UserFunction(f"{flag_name(dest)} ({path})", load_hook(path, dest))
    answer = call_step_hook(hook, args, *values, place=f"step {values[0]}")
    if answer is None or isinstance(answer, bool):
        return bool(answer)
    if inspect.iscoroutine(answer):
        answer.close()
        raise hook.broke("is async, and nobody awaits it", "define it without `async`")
    raise hook.broke(
        f"returned {answer!r:.40}, expected True (it has logged all) or False", "return True or False"
    )
