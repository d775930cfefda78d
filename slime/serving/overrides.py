"""What a server group may set about its engines (`overrides`), by kind of engine.

Invariant: a setting that slime gives itself is refused with who gives it; an unknown one with the nearest
match. Knows no files; the table of an installed SGLang is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from slime.config.flags import flags_of
from slime.config.passthrough import ForeignTable, managed
from slime.config.sections import EngineConfig
from slime.errors import ConfigError
from slime.serving.yaml_nodes import nearest

Complaint: TypeAlias = tuple[str, str]
"""What is wrong, and what to do about it."""
BY_TOPOLOGY: Mapping[str, str] = {
    "disaggregation_mode": "worker_type says it",
    "disaggregation_bootstrap_port": "slime picks a free port and tells the router",
    "encoder_only": "worker_type says it",
    "language_only": "an encoder group in the model says it",
    "encoder_urls": "the model's encoder groups are it",
}
"""ServerArgs fields that the topology decides, and how."""


class OverrideRules(Protocol):
    """What engines of a kind take. Each method gives a complaint, or None."""

    def setting(self, name: str, value: Any) -> Complaint | None:
        """`name` is the field's, with underscores."""
        ...

    def worker_type(self, kind: str) -> Complaint | None:
        """Of a group that is no placeholder."""
        ...

    def size(self, num_gpus: int) -> Complaint | None:
        """Of one engine."""
        ...


class EmbeddedRules:
    """The embedded engine: its flags, one slot an engine, nothing disaggregated."""

    _REMEDY = "--rollout-engine sglang"

    def __init__(self) -> None:
        self._flags = {row.dest: row for row in flags_of(EngineConfig, "engine")}

    def setting(self, name: str, value: Any) -> Complaint | None:
        if name in ("host", "port"):
            return "is given by slime", "leave it out"
        if name not in self._flags:
            return "is no setting of the embedded engine", nearest(name, self._flags)
        try:
            self._flags[name].check(value, name)
        except ConfigError as error:
            return error.message, error.remedy or "see `slime serve --help`"
        return None

    def worker_type(self, kind: str) -> Complaint | None:
        if kind == "regular":
            return None
        return f"the embedded engine knows no {kind} servers", self._REMEDY

    def size(self, num_gpus: int) -> Complaint | None:
        if num_gpus == 1:
            return None
        return f"an embedded engine takes one slot, not {num_gpus}", f"1, or {self._REMEDY}"


class SglangRules:
    """SGLang's ServerArgs.

    Args:
        table: flags of the installed SGLang; None where there is none here, and any name passes.
        in_run: whether the engines serve a run.
    """

    def __init__(self, table: ForeignTable | None, *, in_run: bool = True) -> None:
        self._table = table
        self._managed = managed("sglang", in_run=in_run) | dict(BY_TOPOLOGY)

    def setting(self, name: str, value: Any) -> Complaint | None:
        """As OverrideRules."""
        if name in self._managed:
            return f"is not for overrides: {self._managed[name]}", "leave it out"
        if self._table is None:
            return None
        try:
            self._table.check(name, value, name)
        except ConfigError as error:
            return error.message, error.remedy or "see SGLang's documentation of the field"
        return None

    def worker_type(self, kind: str) -> Complaint | None:
        """As OverrideRules."""
        return None

    def size(self, num_gpus: int) -> Complaint | None:
        """As OverrideRules."""
        return None
