"""Ray itself: started for this run (or joined where RAY_ADDRESS says), and left without a trace.

Knows nothing of training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slime.ray.session_guard import guarded_session
from slime.serving.embedded.process import QUIET, TUNING

_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default of 15 would let any other program on a laptop starve the run.
    "RAY_worker_niceness": "0",
    # Workers that start before they are asked for have no environment of ours, and are of no use.
    "RAY_prestart_worker_first_driver": "0",
}


@contextmanager
def ray_session() -> Iterator[None]:
    """Ray for the length of a run. Local unless RAY_ADDRESS names a cluster; no dashboard, no telemetry."""
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    is_local = os.environ.get("RAY_ADDRESS") is None
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    if is_local:
        options |= {"address": "local", "include_dashboard": False}
    with ExitStack() as stack:
        context = ray.init(**options)
        if is_local:  # its guard ends last: it waits for what Ray's shutdown leaves
            stack.enter_context(guarded_session(context.address_info["session_dir"]))
        stack.callback(ray.shutdown)
        yield


_REPEATABLE = {
    "PYTHONHASHSEED": "0",
    "MKL_CBWR": "AUTO",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What makes sets of text, MKL and cuBLAS repeat themselves from process to process."""


def actor_options(
    threads: int = 1, *, repeatable: bool = False, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Options of an actor that takes turns with the others on the same cores.

    Args:
        threads: calls that run at the same time.
        variables: of its environment, besides.
        repeatable: the same arithmetic in every process (``--deterministic-mode``).
    """
    extra = (_REPEATABLE if repeatable else {}) | dict(variables or {})
    return {
        "num_cpus": 0,
        "max_concurrency": threads,
        "runtime_env": {"env_vars": QUIET | {"PYTHONPATH": _search_path()} | TUNING | extra},
    }


def _search_path() -> str:
    """Where the user's hooks are found: the working folder, then PYTHONPATH."""
    return os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
