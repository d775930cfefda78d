"""Which kinds of local box this machine can make, strongest first, found out by making one of each.

`namespaces`: own root, processes, network and users. `bubblewrap`: the same, made by `bwrap` where only it
may. `plain`: ordinary processes in a directory of their own, with none of that.
"""

from __future__ import annotations

import logging
import shutil
import sys
import uuid
from pathlib import Path
from typing import Literal

from slime.agent.sandbox import bubblewrap
from slime.agent.sandbox.base import SandboxError, SandboxUnavailableError
from slime.agent.sandbox.box.wire import Spec
from slime.agent.sandbox.client import Client, Wrap, close_all, unwrapped
from slime.agent.sandbox.leases import lease_path, runtime_directory

Backend = Literal["namespaces", "bubblewrap", "plain"]
BACKENDS: tuple[Backend, ...] = ("namespaces", "bubblewrap", "plain")
_log = logging.getLogger(__name__)


_found: dict[tuple[Backend, bool], str | None] = {}


async def choose(require: Backend | None) -> tuple[Backend, bool]:
    """The strongest backend that works (or `require`), and whether it mounts overlays.

    Raises:
        SandboxUnavailableError: `require` names one that does not work here.
    """
    reasons: dict[str, str] = {}
    for backend in (require,) if require else BACKENDS:
        if backend == "plain":
            return backend, False
        for overlay in (True, False) if backend == "namespaces" else (False,):
            reason = await _probe(backend, overlay=overlay)
            if reason is None:
                return backend, overlay
            reasons[backend] = reason
    raise SandboxUnavailableError(
        "; ".join(
            f"sandbox backend {backend!r} does not work here: {why}" for backend, why in reasons.items()
        ),
        remedy="allow user namespaces (user.max_user_namespaces, AppArmor), or drop `require`",
    )


async def _probe(backend: Backend, *, overlay: bool) -> str | None:
    """Why it does not work here, or None; found out and told once per process."""
    key = backend, overlay
    if key not in _found:
        reason = await _failure(backend, overlay=overlay)
        if key not in _found and reason is not None:  # else another task was quicker
            what = f"backend {backend!r}" + (" with an overlay" if overlay else "")
            _log.warning("sandbox %s does not work here, taking the next weaker one: %s", what, reason)
        _found[key] = reason
    return _found[key]


async def _failure(backend: Backend, *, overlay: bool) -> str | None:
    """Why a box of this kind cannot be made, or None."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    name = f"probe-{uuid.uuid4().hex[:12]}"
    staging = make_staging(name)
    image = staging.with_suffix(".image")
    (image / "gone").mkdir(parents=True)
    spec = Spec(
        *(name, backend, str(staging), str(lease_path(name)), "/workspace"),
        *(str(image), "overlay" if overlay else "copy", "memory" if backend == "namespaces" else "disk"),
        binds={}, disk=1 << 24, files=10_000, seconds=60, watch={}, processes=None, join=[], cgroups=[],
        counted=[],
    )  # fmt: skip
    try:
        return await _try(spec, image)
    finally:
        shutil.rmtree(image)
        shutil.rmtree(staging, ignore_errors=True)  # the box's own program may have been quicker


async def _try(spec: Spec, image: Path) -> str | None:
    wrap: Wrap = unwrapped
    if spec.kind == "bubblewrap":
        wrap = bubblewrap.wrapper(Path(spec.staging), spec.workdir, image, {})
        spec = spec._replace(image=bubblewrap.IMAGE)
    client = Client(spec, wrap)
    command = "rmdir gone && mkdir gone && ls gone"  # fails where an overlay cannot mark its layers
    try:
        started = await client.ready()
        close_all(started.shown)
        outcome = await client.run(
            ["/bin/sh", "-c", command], cwd=spec.workdir, env={}, stdin=b"", timeout=20, max_output=4096
        )
    except (SandboxError, OSError) as error:
        return str(error)
    finally:
        await client.close()
    return None if outcome.code == 0 else (outcome.failure or outcome.stderr or f"exit code {outcome.code}")


def make_staging(name: str) -> Path:
    """A new box's own directory on the host."""
    staging = runtime_directory() / name
    staging.mkdir(mode=0o700)
    return staging
