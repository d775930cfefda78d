"""Weights to engines of the same machine: through memory that they map (SGLang), or through the trainer's own
file of weights (the embedded engine, which reads no pickles).

Invariant: memory is filled again only when every engine has answered that it read it. Two buffers, so that
one is filled while engines read the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from slime.serving.weights.bucket_buffer import BucketBuffer, ShmNames, device_message, room
from slime.serving.weights.client import WeightClient
from slime.serving.weights.crew import Crew
from slime.serving.weights.outgoing import Outgoing, buckets
from slime.serving.weights.shared import SharedWeights
from slime.serving.weights.sync import WeightSource
from slime.serving.weights.transport import Update, drain

_PATH = "/update_weights_from_tensor"
_Messages: TypeAlias = dict[str, list[str]]
"""By engine name, one a rank."""


class TensorTransport:
    """Buckets in shared memory, as SGLang reads them."""

    has_session = True
    takes_weights = True
    request_fields: ClassVar[Mapping[str, str]] = {}

    def __init__(self, buffer_size: int) -> None:
        """`buffer_size`: bytes of a bucket; twice as many are held."""
        self._buffer_size = buffer_size
        self._names: ShmNames | None = None
        self._buffers: list[BucketBuffer] = []

    def stage(self, update: Update) -> None:
        """Set the memory aside that the host needs: a lack of it is found while engines still generate.

        Raises:
            EngineError: the machine's shared memory is full.
        """
        first = [*itertools.islice(update.weights, 1)]
        update.weights = itertools.chain(first, update.weights)
        self._open()
        if first and not first[0].tensor.is_cuda:
            for buffer, size in zip(self._buffers, room(update.sizes, self._buffer_size), strict=False):
                buffer.reserve(size)

    def send(self, update: Update) -> None:
        """One call a bucket and engine, with a message for each of its ranks."""
        calls, held = None, None
        filled = buckets(update.taken(), self._buffer_size)
        for (bucket, is_last), buffer in zip(filled, itertools.cycle(self._buffers), strict=False):
            messages, memory = _messages(bucket, buffer, update.crew)
            if calls is not None:
                update.crew.finish(calls)
            held = memory
            post = functools.partial(_post, messages=messages, naming=update.naming(is_last))
            calls = update.crew.start("weights", post)
        if calls is not None:
            update.crew.finish(calls)
        del held
        for buffer in self._buffers:
            buffer.release()

    def follow(self, source: WeightSource, version: int) -> None:
        """Go through the weights."""
        drain(source.weights())

    def forget(self) -> None:
        """Nothing is held of engines."""

    def close(self) -> None:
        """Give the buffers up."""
        for buffer in self._buffers:
            buffer.close()
        if self._names is not None:
            self._names.close()
        self._names, self._buffers = None, []

    def _open(self) -> None:
        if self._names is None:
            self._names = ShmNames()
            self._buffers = [BucketBuffer(self._names), BucketBuffer(self._names)]


class SharedFileTransport:
    """The file that the trainer's weights live in, or are copied to, as the embedded engine reads it."""

    has_session = True
    takes_weights = True
    request_fields: ClassVar[Mapping[str, str]] = {}

    def __init__(self, shared: SharedWeights | None, *, aliases: bool) -> None:
        """
        Args:
            shared: the trainer's own file; None makes one at the first update.
            aliases: engines compute with the file itself instead of a copy: it changes while they are paused.
        """
        self._shared = shared
        self._is_own = shared is None
        self._aliases = aliases

    def stage(self, update: Update) -> None:
        """Engines with a copy do not see the file change."""
        if not self._aliases:
            self._publish(update)

    def send(self, update: Update) -> None:
        """One call: the path."""
        if self._aliases:
            self._publish(update)
        assert self._shared is not None
        body = {
            "serialized_named_tensors": [str(self._shared.path)],
            "load_format": "shared_memory" if self._aliases else "shared_memory_copy",
            **update.naming(is_last=True),
            "flush_cache": True,
        }
        update.crew.each("weights", lambda engine: engine.post(_PATH, body))

    def follow(self, source: WeightSource, version: int) -> None:
        """Go through the weights."""
        drain(source.weights())

    def forget(self) -> None:
        """Nothing is held of engines."""

    def close(self) -> None:
        """Unlink a file that was made here."""
        if self._is_own and self._shared is not None:
            self._shared.unlink()

    def _publish(self, update: Update) -> None:
        """Bring the file up to date where the trainer's weights do not live in it."""
        if self._shared is None:
            items = [*update.taken()]
            self._shared = SharedWeights.create((item.name, item.converted()) for item in items)
            self._shared.hide()
            return
        for item in update.taken():
            view = self._shared.views[item.name]
            if item.tensor.data_ptr() != view.data_ptr():
                view.copy_(item.tensor.detach())


def _messages(bucket: Sequence[Outgoing], buffer: BucketBuffer, crew: Crew) -> tuple[_Messages, Any]:
    """Messages by engine, and what must live until they are answered."""
    if bucket[0].tensor.is_cuda:
        text, memory = device_message(bucket)
        return {engine.name: [text] * engine.endpoint.world_size for engine in crew.members}, memory
    texts = iter(buffer.fill(bucket, crew.world_size))
    return {e.name: [*itertools.islice(texts, e.endpoint.world_size)] for e in crew.members}, None


def _post(engine: WeightClient, *, messages: _Messages, naming: dict[str, object]) -> None:
    body = {
        "serialized_named_tensors": messages[engine.name],
        "load_format": "flattened_bucket",
        **naming,
    }
    engine.post_weights(_PATH, body)
