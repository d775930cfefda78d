"""Which kinds of local box this machine can make, strongest first, found out by making one of each.

`namespaces`: own root, processes, network and users. `bubblewrap`: the same, made by `bwrap` where only it
may. `plain`: ordinary processes in a directory of their own, with none of that.
"""

from __future__ import annotations

import logging
import shutil
import sys
import uuid
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Probe:
    """What this machine can do: the reason against each backend that failed, and whether an overlay can be
    mounted.
    """

    reasons: dict[str, str]
    overlay: bool

    @property
    def best(self) -> Backend:
        """The strongest backend that works."""
        return next(backend for backend in BACKENDS if backend not in self.reasons)


_found: Probe | None = None


async def probe() -> Probe:
    """Try the backends, once per process."""
    global _found
    if _found is not None:
        return _found
    found = await _try_all()
    if _found is None:  # else another task was quicker
        _found = found
        for backend, reason in found.reasons.items():
            _log.warning("sandbox backend %r does not work here (%s); using %r", backend, reason, found.best)
    return found


async def choose(require: Backend | None) -> tuple[Backend, bool]:
    """The backend to use, and whether it mounts overlays.

    Raises:
        SandboxUnavailableError: `require` names one that does not work here.
    """
    if require == "plain":
        return "plain", False
    found = await probe()
    if require is not None and require in found.reasons:
        raise SandboxUnavailableError(
            f"sandbox backend {require!r} does not work here: {found.reasons[require]}",
            remedy="allow user namespaces (user.max_user_namespaces, AppArmor), or drop `require`",
        )
    backend = require or found.best
    return backend, found.overlay and backend == "namespaces"


async def _try_all() -> Probe:
    reasons: dict[str, str] = {}
    overlay_reason = await _failure("namespaces", overlay=True)
    if overlay_reason is not None and (reason := await _failure("namespaces", overlay=False)) is not None:
        reasons["namespaces"] = reason
    if "namespaces" in reasons and (reason := await _failure("bubblewrap", overlay=False)) is not None:
        reasons["bubblewrap"] = reason
    return Probe(reasons, overlay_reason is None)


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
        binds={}, disk=1 << 24, files=10_000, seconds=60, watch={}, processes=None, join=[], cgroups=[], counted=[],
    )  # fmt: skip
    try:
        return await _try(spec, image)
    finally:
        shutil.rmtree(image)
        shutil.rmtree(staging, ignore_errors=True)  # the box's own program may have been quicker


async def _try(spec: Spec, image: Path) -> str | None:
    wrap: Wrap = unwrapped
    if spec.kind == "bubblewrap":
        wrap, _ = bubblewrap.wrapper(Path(spec.staging), spec.workdir, image, {})
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
