"""`EngineCore`: what the HTTP face needs of an engine. The embedded engine and the scripted one both provide it.

Invariant: every method may be called from any thread; control methods return when they took effect.
Torch-free; knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from slime.config.sections import EngineConfig
from slime.serving.embedded.request import Request, Update

if TYPE_CHECKING:
    import torch

PauseMode: TypeAlias = Literal["abort", "in_place", "retract"]
Listener: TypeAlias = Callable[[Update], None]


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Load of an engine now, and totals since its start; all quantities but the last are counts.

    Attributes:
        num_used_tokens: tokens of cache that live requests hold.
        max_total_num_tokens: tokens of cache in all.
        gen_throughput: sampled tokens per second, lately.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_output_tokens: int = 0
    gen_throughput: float = 0.0


class EngineCore(Protocol):
    """An engine below HTTP. Requests that it is given are already checked."""

    @property
    def model_path(self) -> str: ...

    @property
    def config(self) -> EngineConfig: ...

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
    def weight_version(self) -> str: ...

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight by Hugging Face name, tied weights once."""
        ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_alive(self) -> bool:
        """False before `start`, after `shutdown`, and when the worker died."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def start(self) -> None: ...

    def shutdown(self) -> None:
        """End the worker; requests in flight end as aborted."""
        ...

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. `listener` gets its updates on the worker thread and must not block.

        Raises:
            EngineUnavailableError: the worker is not alive.
        """
        ...

    def abort(self, rid: str) -> None:
        """End a request early; it still gets a last update with what it has. Unknown ids are ignored."""
        ...

    def abort_all(self) -> None: ...

    def pause(self, mode: PauseMode) -> None:
        """Stop generating; requests in flight end (abort), keep their cache (in_place) or lose it (retract)."""
        ...

    def resume(self) -> None: ...

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False when requests hold cache."""
        ...

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: str | None,
        *,
        alias: bool,
        flush: bool,
    ) -> None:
        """Copy the tensors into the model or, with `alias`, make them its weights.

        Raises:
            ModelError: unknown name or wrong shape; nothing was changed.
        """
        ...

    def set_weight_version(self, version: str) -> None: ...

    def release_memory(self) -> None: ...

    def resume_memory(self) -> None: ...
