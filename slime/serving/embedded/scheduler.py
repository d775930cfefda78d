"""Which requests run, and what the next forward computes: admission, chunked prefill, reuse, retraction.

Invariant: key-value tokens of live requests plus those kept for reuse never exceed the capacity; between
steps a live sequence is either in `prefilling` or in a cache slot. Knows nothing of models or threads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime.serving.embedded.attention import DecodeGroup, ForwardBatch, PrefillSpan
from slime.serving.embedded.kv_cache import KVCache, KVShape, copy_pieces
from slime.serving.embedded.prefix_cache import PrefixCache
from slime.serving.embedded.sequence import Sequence
from slime.utils.routes import Routes

logger = logging.getLogger(__name__)

HEADROOM = 32
"""Tokens kept free for each live request at an admission, so that it is not retracted at once."""
WORTH_WAITING = 16
"""A request waits for a running prefill that shares so many tokens more with it than the store does."""
SCORED_LOGITS = 2**26
"""Most logits of scored prompt tokens in one forward (256 MiB)."""


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class Plan:
    """One forward. Kept logits: one row for each of `sampled`, then `count` rows for each of `scored`."""

    parts: list[DecodeGroup | PrefillSpan] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    spans: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def batch(self) -> ForwardBatch:
        """What the attention sees."""
        return ForwardBatch(self.parts)

    def split(self, rows: Routes) -> Iterator[tuple[Sequence, Routes]]:
        """What belongs to each request of `rows`, one for each token of the forward."""
        decoded = len(self.ids) - sum(count for _, count in self.spans)
        for index, sequence in enumerate(self.sampled[:decoded]):
            yield sequence, rows[index : index + 1]
        start = decoded
        for sequence, count in self.spans:
            yield sequence, rows[start : start + count]
            start += count


class Scheduler:
    """Waiting and live requests, and their key-value memory."""

    def __init__(
        self,
        shape: KVShape,
        *,
        capacity: int,
        max_running: int,
        chunk: int,
        context_length: int,
        vocab_size: int,
        reuses_prefixes: bool = True,
    ) -> None:
        self.capacity = capacity
        self.max_running = max_running
        self.chunk = chunk
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.live: dict[str, Sequence] = {}
        self.store = PrefixCache()
        self.counters = Counters()
        self._shape = shape
        self._cache: KVCache[Sequence] = KVCache(shape, context_length, slots=max_running, capacity=capacity)
        self._epoch = 0
        self._reuses_prefixes = reuses_prefixes
        self._score_rows = max(1, SCORED_LOGITS // vocab_size)

    @property
    def held_tokens(self) -> int:
        """Key-value tokens of live requests. May be read from any thread."""
        return sum(sequence.held_tokens for sequence in list(self.live.values()))

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.live or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a new request at the end of the queue."""
        self.waiting.append(sequence)

    def find(self, rid: str) -> Sequence | None:
        """A request by name, live or waiting."""
        return self.live.get(rid) or next((s for s in self.waiting if s.rid == rid), None)

    def drop(self, sequence: Sequence) -> None:
        """Take out a request that ended; its keys and values stay for reuse where there is room."""
        if sequence.rid not in self.live:
            self.waiting.remove(sequence)
            return
        self._keep(sequence)
        self._release(sequence)

    def discard(self, sequences: Iterable[Sequence]) -> None:
        """Take out live requests whose keys and values cannot be trusted."""
        for sequence in sequences:
            if sequence.place is not None:
                self._cache.wipe(sequence.place)
            self._release(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Drop a live request's keys and values, and let it wait at the front."""
        self._release(sequence)
        sequence.retract()
        self.waiting.appendleft(sequence)

    def retract_all(self) -> None:
        """Retract every live request; they wait in order of arrival."""
        for sequence in sorted(self.live.values(), key=lambda s: -s.order):
            self.retract(sequence)

    def flush(self) -> None:
        """Forget all kept keys and values; those of live requests will not be kept."""
        self.store.clear()
        self._epoch += 1

    def free_memory(self) -> None:
        """Give all key-value memory back. No request may be live."""
        self.flush()
        self._cache.clear()

    def plan(self) -> Plan:
        """Make room, admit, and lay out the next forward."""
        self._make_room_to_grow()
        self._admit()
        plan = Plan()
        self._plan_decode(plan)
        self._plan_prefill(plan)
        self.counters.steps += 1
        self.counters.decode_tokens += len(plan.ids) - sum(rows for _, rows in plan.spans)
        self.counters.prefill_tokens += sum(rows for _, rows in plan.spans)
        return plan

    def advance(self, plan: Plan) -> None:
        """Record that the plan was computed, before tokens are appended."""
        for sequence in plan.sampled:
            if sequence.place is not None:
                sequence.place.filled += 1
        for sequence, rows in plan.spans:
            sequence.computed += rows
            if sequence.computed == len(sequence.tokens):
                self.prefilling.remove(sequence)
                self._keep(sequence)

    def settle(self, sequence: Sequence) -> None:
        """After its token: drop the request if it ended, else see that it has a slot with room."""
        if sequence.finish_reason is not None:
            self.drop(sequence)
        elif sequence.place is not None:
            self._cache.make_room(sequence.place)
        else:
            assert sequence.buffer is not None
            sequence.place = self._cache.add(sequence, [sequence.buffer])
            sequence.buffer = None

    # --- memory

    def _free_tokens(self) -> int:
        return self.capacity - self.held_tokens - self.store.tokens

    def _evict_to(self, free: int) -> None:
        shortage = free - self._free_tokens()
        if shortage > 0:
            self.store.evict(max(shortage, self.capacity // 32))

    def _make_room_to_grow(self) -> None:
        self._evict_to(0)
        while self._free_tokens() < 0:
            self.retract(max(self.live.values(), key=lambda s: s.order))

    def _keep(self, sequence: Sequence) -> None:
        """Store the keys and values of all positions that are computed, where memory allows."""
        if sequence.epoch != self._epoch or not self._reuses_prefixes:
            return
        place, buffer = sequence.place, sequence.buffer
        tokens = sequence.tokens[: place.filled if place is not None else sequence.computed]
        self._evict_to(self.store.missing(tokens))
        if self.store.missing(tokens) > self._free_tokens():
            return

        def read(start: int, stop: int) -> Tensor:
            if place is not None:
                return self._cache.read(place, start, stop)
            assert buffer is not None
            return buffer[:, :, :, start:stop].clone(memory_format=torch.contiguous_format)

        try:
            self.store.insert(tokens, read)
        except (MemoryError, RuntimeError):  # torch reports a failed allocation as RuntimeError
            logger.warning("keys and values of request %s are not kept", sequence.rid, exc_info=True)

    def _release(self, sequence: Sequence) -> None:
        if sequence.place is not None:
            self._cache.remove(sequence.place)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        sequence.place = sequence.buffer = None
        del self.live[sequence.rid]

    # --- admission

    def _admit(self) -> None:
        held: list[Sequence] = []
        try:
            while self.waiting and len(self.live) < self.max_running and self._pending_prefill() < self.chunk:
                sequence = self.waiting[0]
                if self._should_wait(sequence):
                    held.append(self.waiting.popleft())
                elif self._fits(sequence):
                    self._start(self.waiting.popleft())
                else:
                    break
        finally:
            self.waiting.extendleft(reversed(held))

    def _pending_prefill(self) -> int:
        return sum(len(s.tokens) - s.computed for s in self.prefilling)

    def _fits(self, sequence: Sequence) -> bool:
        if not self.live:
            return True
        promised = self.held_tokens + HEADROOM * (len(self.live) + 1)
        return promised + len(sequence.tokens) <= self.capacity

    def _should_wait(self, sequence: Sequence) -> bool:
        """Whether a prompt that is being computed will give this one much of its prefix."""
        limit = sequence.reusable_length
        shared = max((_common_prefix(sequence.tokens, s.tokens, limit) for s in self.prefilling), default=0)
        if shared < min(WORTH_WAITING, limit) or shared == 0:
            return False
        return shared - self._matched(sequence, shared) >= min(WORTH_WAITING, shared)

    def _matched(self, sequence: Sequence, limit: int) -> int:
        return limit - self.store.missing(sequence.tokens[:limit])

    def _start(self, sequence: Sequence) -> None:
        """Give the request memory, with the stored part of its prefix; it is live even if that fails."""
        self.live[sequence.rid] = sequence
        total, limit = len(sequence.tokens), sequence.reusable_length
        self._matched(sequence, limit)
        self._evict_to(total + 1)
        pieces = self.store.match(sequence.tokens[:limit])
        cached = sum(piece.shape[3] for piece in pieces)
        sequence.epoch = self._epoch
        sequence.computed = cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self.counters.cached_tokens += cached
        sequence.begin_scores()
        if cached == total - 1 and sequence.max_new_tokens > 0:
            sequence.place = self._cache.add(sequence, pieces)
            return
        sequence.buffer = self._shape.buffer(total)
        copy_pieces(sequence.buffer, pieces)
        self.prefilling.append(sequence)

    # --- layout

    def _plan_decode(self, plan: Plan) -> None:
        for arena, places in self._cache.groups():
            positions = [place.filled for place in places]
            plan.parts.append(DecodeGroup(arena, torch.tensor(positions), max(positions) + 1))
            plan.positions += positions
            plan.ids += [place.owner.tokens[-1] for place in places]
            plan.sampled += [place.owner for place in places]
        plan.keep += range(len(plan.ids))

    def _plan_prefill(self, plan: Plan) -> None:
        scored_rows: list[int] = []
        budget, score_budget = self.chunk, self._score_rows
        for sequence in self.prefilling:
            start, offset = sequence.computed, len(plan.ids)
            rows = min(len(sequence.tokens) - start, budget)
            scores = range(0)
            if sequence.score_start is not None:
                rows = min(rows, score_budget)
                scores = range(
                    max(start, sequence.score_start), min(start + rows, sequence.prompt_length - 1)
                )
            if rows == 0:
                break
            budget, score_budget = budget - rows, score_budget - len(scores)
            assert sequence.buffer is not None
            plan.parts.append(PrefillSpan(sequence.buffer, start, rows))
            plan.ids += sequence.tokens[start : start + rows]
            plan.positions += range(start, start + rows)
            plan.spans.append((sequence, rows))
            if scores:
                plan.scored.append((sequence, len(scores)))
                scored_rows += [offset + position - start for position in scores]
            if start + rows == len(sequence.tokens) and sequence.max_new_tokens > 0:
                plan.sampled.append(sequence)
                plan.keep.append(offset + rows - 1)
        plan.keep += scored_rows


def _common_prefix(left: list[int], right: list[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`."""
    limit = min(limit, len(left), len(right))
    if left[:WORTH_WAITING] != right[:WORTH_WAITING] and limit >= WORTH_WAITING:
        return 0
    if left[:limit] == right[:limit]:
        return limit
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), limit)
