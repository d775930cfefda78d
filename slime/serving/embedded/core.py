"""`EngineCore`: what the HTTP face needs of an engine. The embedded and the scripted engine provide it.

Invariant: every method may be called from any thread; control methods return when they took effect.
Torch-free; knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from slime.serving.embedded.request import Request, Update

if TYPE_CHECKING:
    import torch

PauseMode: TypeAlias = Literal["abort", "in_place", "retract"]
Listener: TypeAlias = Callable[[Update], None]
HEALTH_RID = "HEALTH_CHECK"
"""How the names of health probes begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load of an engine now, and totals since its start. All are counts but `busy_seconds`.

    Attributes:
        used_tokens, reusable_tokens: key-value tokens of live requests, and kept for later ones.
        capacity: most key-value tokens.
        prefill_tokens, cached_tokens: prompt tokens computed, and taken from kept prefixes.
    """

    running: int
    waiting: int
    used_tokens: int
    reusable_tokens: int
    capacity: int
    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int
    steps: int = 0
    busy_seconds: float = 0.0


class EngineCore(Protocol):
    """An engine below HTTP. Requests that it is given are already checked.

    Every method but `shutdown` raises EngineUnavailableError while the worker does not run.
    """

    @property
    def model_path(self) -> str: ...

    @property
    def model_config(self) -> Any:
        """The Hugging Face config: at least `architectures`, `model_type`."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def takes_images(self) -> bool:
        """Whether requests may hold images."""
        ...

    @property
    def tells_routes(self) -> bool:
        """Whether it tells the experts of tokens where asked."""
        ...

    @property
    def weight_version(self) -> str: ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs: False before `start`, after `shutdown`, and when it died."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def start(self) -> None: ...

    def shutdown(self) -> None:
        """End the worker; requests in flight end as aborted."""
        ...

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. `listener` gets its updates on the worker thread and must not block."""
        ...

    def abort(self, rid: str) -> None:
        """End a request early; it still gets a last update with what it has. Unknown ids are ignored."""
        ...

    def abort_all(self) -> None: ...

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. Those in flight end (abort), keep their cache (in_place) or lose it (retract)."""
        ...

    def resume(self) -> None: ...

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False when requests hold cache."""
        ...

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        alias: bool,
        flush: bool,
    ) -> None:
        """Copy the tensors into the model or, with `alias`, make them its weights.

        Raises:
            EngineError: a name is unknown or missing, or a shape wrong; nothing was changed.
        """
        ...

    def set_weight_version(self, version: str) -> None: ...

    def release_memory(self) -> None:
        """Give key-value memory back.

        Raises:
            EngineError: requests hold it.
        """
        ...

    def resume_memory(self) -> None: ...
