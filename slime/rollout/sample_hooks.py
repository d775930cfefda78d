"""Sample hooks: user functions that see every sample after its generation and before its reward.

Invariant: the structure of the result is that of the input; a hook replaces samples one for one.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.hooks import accepted_kwargs, flag_name, load_hook, run_hook
from slime.utils.types import Sample

DEST = "rollout_sample_hook_path"


async def apply_rollout_sample_hooks(
    args: Any, samples: Any, *, rollout_id: int | None = None, evaluation: bool = False
) -> Any:
    """Run the hooks of `args.rollout_sample_hook_path`, in order, on each sample of a nested list.

    A hook is ``(args, sample, *, rollout_id, evaluation)``, async or not; keyword arguments that it does not
    name are left out. Returning None keeps the sample.

    Raises:
        TypeError: a hook returned something else than a Sample or None.
        HookError: a hook does not import, cannot take the call, or raised.
    """
    paths = getattr(args, DEST, None) or []
    for path in [paths] if isinstance(paths, str) else paths:
        samples = await _apply(path, args, samples, {"rollout_id": rollout_id, "evaluation": evaluation})
    return samples


async def _apply(path: str, args: Any, samples: Any, context: dict[str, Any]) -> Any:
    if isinstance(samples, list):
        return [await _apply(path, args, item, context) for item in samples]
    hook = load_hook(path, DEST)
    kwargs = accepted_kwargs(hook, context)
    result = await run_hook(hook, flag_name(DEST), (args, samples), kwargs, allow_sync=True)
    if result is None:
        return samples
    if isinstance(result, Sample):
        return result
    raise TypeError(f"sample hook {path}: expected Sample or None, got {type(result).__name__}")
