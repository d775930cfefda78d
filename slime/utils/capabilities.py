"""What an engine can do: all that depends on its version, read off a running server.

Invariant: a route is there because the server says so, not because of its version; versions decide only what
no question shows, and an unknown one counts by its number. Holds for SGLang from 0.5.15 and for the embedded
engine. Knows no HTTP: the answers are handed in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slime.errors import CapabilityError, EngineError

Engine: TypeAlias = Literal["sglang", "embedded"]
EMBEDDED = "slime-embedded"
"""What the embedded engine's ``/server_info`` has as ``engine``."""
ROUTES = ("/begin_weight_update", "/v1/loads", "/get_load", "/load_lora_adapter", "/pull_weights")
"""Those that not every engine has. Asked for by OPTIONS, which no route answers but with "not allowed"."""
_OLDEST, _NEWER = (0, 5, 15), (0, 5, 23)
_NEED = {
    "weight_sessions": ("updates of weights in a session", "SGLang 0.5.23"),
    "version_spans": ("the weight version of each token", "SGLang 0.5.23"),
    "routed_experts": ("routes of experts", "an engine that is started with --enable-return-routed-experts"),
    "lora": ("LoRA adapters", "an engine that is started with --enable-lora"),
    "checksums": ("checksums of weights", "SGLang 0.5.23"),
    "pulls_weights": ("reading changes of weights from a folder", "an SGLang with /pull_weights"),
    "repeats_seeds": ("seeds that repeat", "an engine that is started with --enable-deterministic-inference"),
}


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Facts of one running engine.

    Attributes:
        version: of the program.
        weight_sessions: tensors are taken between begin and end of a weight update only.
        pauses: modes that an update of weights may be done in, without the loss of what runs being the loss
            of the server.
        flushes_in_place: whether an update may drop the prefix cache while requests are paused in place.
        version_spans: an answer tells of each token which weights sampled it.
        routed_experts: it tells the routes of tokens through experts where asked.
        lora: adapters can be loaded.
        checksums: it can sum its weights.
        pulls_weights: it applies changes from a folder.
        repeats_seeds: a `sampling_seed` gives the same tokens again.
        loads_route: where it tells how busy it is.
        own_draft: it drafts by a model of another folder, which an update of the policy must not touch.
    """

    engine: Engine
    version: str
    weight_sessions: bool
    pauses: frozenset[str]
    flushes_in_place: bool
    version_spans: bool
    routed_experts: bool
    lora: bool
    checksums: bool
    pulls_weights: bool
    repeats_seeds: bool
    loads_route: str
    own_draft: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def require(self, capability: str, *, needed_by: str, place: str) -> None:
        """Check for a capability, the name of an attribute that is true or false.

        Args:
            needed_by: the flag or feature.
            place: the server.

        Raises:
            CapabilityError: it is missing; names it, the server's version and what to do.
        """
        if not getattr(self, capability):
            what, remedy = _NEED[capability]
            raise self._lacks(what, needed_by, place, f"use {remedy}, or leave {needed_by} out")

    def require_pause(self, mode: str, *, needed_by: str, place: str) -> None:
        """The same for a pause around an update of weights."""
        if mode not in self.pauses:
            have = ", ".join(sorted(self.pauses))
            remedy = (
                f"pause with one of {have}; a run waits, and aborts nothing, with --update-in-flight wait"
            )
            raise self._lacks(f"pause {mode!r} that is safe around an update", needed_by, place, remedy)

    def _lacks(self, what: str, needed_by: str, place: str, remedy: str) -> CapabilityError:
        called = "SGLang" if self.engine == "sglang" else "the embedded engine"
        return CapabilityError(
            f"{called} {self.version} has no {what}, which {needed_by} needs", place=place, remedy=remedy
        )


def capabilities_of(server_info: Mapping[str, Any], routes: frozenset[str], place: str) -> Capabilities:
    """Judge a server.

    Args:
        server_info: its answer to ``/server_info``.
        routes: those of `ROUTES` that it has.

    Raises:
        EngineError: it does not tell its version, or is an SGLang before 0.5.15.
    """
    version = str(server_info.get("version", ""))
    is_embedded = server_info.get("engine") == EMBEDDED
    number = _number(version)
    if not is_embedded and (number is None or number < _OLDEST):
        raise EngineError(
            f"is SGLang {version or 'of an unknown version'}",
            place=place,
            remedy="use SGLang 0.5.15 or newer",
        )
    is_newer = is_embedded or (number is not None and number >= _NEWER)
    return Capabilities(
        engine="embedded" if is_embedded else "sglang",
        version=version,
        weight_sessions="/begin_weight_update" in routes,
        # Older ones die when an update flushes what a retraction left.
        pauses=frozenset({"abort", "in_place", "retract"} if is_newer else {"abort", "in_place"}),
        flushes_in_place=is_embedded,
        version_spans=is_newer,
        routed_experts=bool(server_info.get("enable_return_routed_experts")),
        lora="/load_lora_adapter" in routes and bool(server_info.get("enable_lora")),
        checksums=is_newer and not is_embedded,
        pulls_weights="/pull_weights" in routes,
        repeats_seeds=is_embedded or bool(server_info.get("enable_deterministic_inference")),
        loads_route="/v1/loads" if is_newer or "/get_load" not in routes else "/get_load",
        own_draft=_has_own_draft(server_info),
        tool_call_parser=server_info.get("tool_call_parser"),
        reasoning_parser=server_info.get("reasoning_parser"),
    )


def _has_own_draft(server_info: Mapping[str, Any]) -> bool:
    draft = server_info.get("speculative_draft_model_path")
    return bool(server_info.get("speculative_algorithm") and draft and draft != server_info.get("model_path"))


def _number(version: str) -> tuple[int, ...] | None:
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return None if found is None else tuple(map(int, found.groups()))
