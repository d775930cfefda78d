"""Loading of user functions by dotted path, and the process-wide singleton that plugins subclass.

Owns: how a path becomes a callable, with an error that says which part of it failed.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import threading
from typing import Any

from slime.errors import HookError


@functools.cache
def load_function(path: str) -> Any:
    """Resolve ``package.module.attribute`` (or ``package.module:attribute``), once per process.

    Raises:
        HookError: the module does not import, or has no such attribute.
    """
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise HookError(
            f"{path!r} is not a dotted path to a function", remedy="write it as package.module.function"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise HookError(
            f"cannot import {module_name!r} for hook {path!r}: {type(error).__name__}: {error}",
            remedy="run `python -c 'import " + module_name + "'` and see; the module must be on PYTHONPATH",
        ) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise HookError(
            f"module {module_name!r} has no attribute {attribute!r}",
            place=path,
            remedy=f"did you mean {module_name}.{near[0]}?" if near else None,
        )
    return getattr(module, attribute)


class SingletonMeta(type):
    """Metaclass whose classes have one instance a process (thread-safe)."""

    _instances: dict[type, Any] = {}  # noqa: RUF012 - shared on purpose
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    def clear_instance(cls) -> None:
        """Forget the instance, so that the next call builds a new one (for tests)."""
        with SingletonMeta._lock:
            SingletonMeta._instances.pop(cls, None)
