"""Key-value memory of the sequences that decode: arenas by length class.

Invariant: the live slots of an arena are 0..B-1 without holes (a removed slot is filled by the last one), so
that attention reads plain views and never gathers, and that all their memory holds finite numbers, because it
reads behind a sequence too. A sequence lives in the smallest class that holds it.
Knows nothing of models, requests or prefixes; a slot's owner is any object.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

SMALLEST_CLASS = 256
"""Positions of the shortest arena; each next one is twice as long."""
SPREAD = 3
"""Arenas may have touched memory for so many times the capacity before the unused part is given back."""

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one token: [layers, 2, kv_heads, dim] of `dtype`."""

    layers: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token."""
        return self.layers * 2 * self.kv_heads * self.dim * self.dtype.itemsize

    def buffer(self, tokens: int) -> Tensor:
        """Uninitialised compact memory [layers, 2, kv_heads, tokens, dim]."""
        return torch.empty(self.layers, 2, self.kv_heads, tokens, self.dim, dtype=self.dtype)


class Arena:
    """Slots of one length class: memory [layers, 2, slots, kv_heads, length, dim] that grows."""

    def __init__(self, shape: KVShape, length: int) -> None:
        self.shape = shape
        self.length = length
        self.dtype = shape.dtype
        self._allocate(0)

    def _allocate(self, slots: int) -> None:
        shape = self.shape
        self.memory = _zeros(
            shape.layers, 2, slots, shape.kv_heads, self.length, shape.dim, dtype=shape.dtype
        )
        self.slots = slots
        rows = slots * shape.kv_heads
        self._flat = [[half.view(rows * self.length, shape.dim) for half in layer] for layer in self.memory]
        self._heads = [[half.view(rows, self.length, shape.dim) for half in layer] for layer in self.memory]
        self._row_starts = torch.arange(rows) * self.length

    def renew(self, slots: int, used: int, width: int) -> None:
        """Take fresh memory for `slots` slots; keep the first `width` positions of the first `used`."""
        old = self.memory
        self._allocate(slots)
        self.memory[:, :, :used, :, :width] = old[:, :, :used, :, :width]

    def free(self) -> None:
        """Give the memory back."""
        self._allocate(0)

    def row_index(self, positions: Tensor) -> Tensor:
        """Rows of `write_rows` for the token at `positions[i]` of slot i; [B] -> [B * kv_heads]."""
        heads = self.shape.kv_heads
        return self._row_starts[: positions.shape[0] * heads] + positions.repeat_interleave(heads)

    def write_rows(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token a slot: keys and values are [B * kv_heads, dim]."""
        flat = self._flat[layer]
        flat[0][index] = keys
        flat[1][index] = values

    def view(self, layer: int, slots: int, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots and positions, each [slots * kv_heads, width, dim]."""
        keys, values = self._heads[layer]
        rows = slots * self.shape.kv_heads
        return keys[:rows, :width], values[:rows, :width]

    def slot(self, index: int) -> Tensor:
        """Memory of one slot, [layers, 2, kv_heads, length, dim]."""
        return self.memory[:, :, index]


@dataclass(slots=True)
class Place(Generic[Owner]):
    """Where a sequence lives, and how many of its positions are filled."""

    owner: Owner
    arena: Arena
    slot: int
    filled: int


class KVCache(Generic[Owner]):
    """All arenas, and who lives where.

    An arena is made for `slots` sequences, or as many as `capacity` tokens allow: memory not written to
    costs nothing, but growth costs a copy.
    """

    def __init__(self, shape: KVShape, context_length: int, *, slots: int = 4, capacity: int = 2**20) -> None:
        self.shape = shape
        self._slots = slots
        self._capacity = capacity
        self.context_length = context_length
        self._arenas: dict[int, Arena] = {}
        self._touched: dict[int, int] = {}
        self._places: dict[int, list[Place[Owner]]] = {}

    def groups(self) -> list[tuple[Arena, list[Place[Owner]]]]:
        """Arenas with live slots, shortest first; the list position is the slot."""
        return [(self._arenas[length], places) for length, places in sorted(self._places.items()) if places]

    def add(self, owner: Owner, pieces: list[Tensor]) -> Place[Owner]:
        """Give `owner` a slot filled with `pieces`, each [layers, 2, kv_heads, n, dim], in order."""
        filled = sum(piece.shape[3] for piece in pieces)
        place = self._open(owner, filled + 1)
        copy_pieces(place.arena.slot(place.slot), pieces)
        place.filled = filled
        return place

    def make_room(self, place: Place[Owner]) -> None:
        """Move the sequence to a longer class when its next position would not fit."""
        if place.filled >= place.arena.length:
            self._move(place)

    def read(self, place: Place[Owner], start: int, stop: int) -> Tensor:
        """A compact copy of positions start..stop, [layers, 2, kv_heads, stop - start, dim]."""
        return place.arena.slot(place.slot)[:, :, :, start:stop].clone(memory_format=torch.contiguous_format)

    def remove(self, place: Place[Owner]) -> None:
        """Free the slot; the arena's last sequence moves into it."""
        places = self._places[place.arena.length]
        last = places.pop()
        if last is place:
            return
        source, target = place.arena.slot(last.slot), place.arena.slot(place.slot)
        target[:, :, :, : last.filled] = source[:, :, :, : last.filled]
        last.slot = place.slot
        places[last.slot] = last

    def wipe(self, place: Place[Owner]) -> None:
        """Forget what the slot holds, the position being filled included: it may not be finite."""
        place.arena.slot(place.slot)[:, :, :, : place.filled + 1] = 0

    def clear(self) -> None:
        """Free all memory. No sequence may be live."""
        self._arenas.clear()
        self._touched.clear()
        self._places.clear()

    def _length_class(self, tokens: int) -> int:
        length = SMALLEST_CLASS
        while length < tokens:
            length *= 2
        return min(length, max(self.context_length, tokens))

    def _open(self, owner: Owner, tokens: int) -> Place[Owner]:
        length = self._length_class(tokens)
        if length not in self._arenas:
            self._arenas[length], self._places[length] = Arena(self.shape, length), []
        arena, places = self._arenas[length], self._places[length]
        count = len(places)
        self._touched[length] = max(self._touched.get(length, 0), count + 1)
        if count == arena.slots:
            roomy = max(count + 1 + count // 2, min(self._slots, self._capacity // length))
            arena.renew(roomy, count, _width(places))
        places.append(Place(owner, arena, count, 0))
        if sum(length * slots for length, slots in self._touched.items()) > SPREAD * self._capacity:
            self._renew()
        return places[-1]

    def _renew(self) -> None:
        """Give back the memory of slots that were used once and are empty now."""
        for length, places in self._places.items():
            arena = self._arenas[length]
            arena.renew(arena.slots, len(places), _width(places))
            self._touched[length] = len(places)

    def _move(self, place: Place[Owner]) -> None:
        new = self._open(place.owner, place.filled + 1)
        filled = place.filled
        new.arena.slot(new.slot)[:, :, :, :filled] = place.arena.slot(place.slot)[:, :, :, :filled]
        old_arena = place.arena
        self.remove(place)
        if not self._places[old_arena.length]:
            old_arena.free()
            self._touched[old_arena.length] = 0
        place.arena, place.slot = new.arena, new.slot
        self._places[new.arena.length][new.slot] = place


def _width(places: list[Place[Owner]]) -> int:
    return max((place.filled for place in places), default=0)


def _zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Zeroed memory from the system; unlike with `torch.zeros`, a page costs nothing until written to."""
    count = math.prod(sizes) * dtype.itemsize
    if not count:
        return torch.empty(sizes, dtype=dtype)
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(sizes)


def copy_pieces(target: Tensor, pieces: list[Tensor]) -> int:
    """Copy pieces [layers, 2, kv_heads, n, dim] to the front of `target`; returns the tokens copied."""
    filled = 0
    for piece in pieces:
        count = piece.shape[3]
        target[:, :, :, filled : filled + count] = piece
        filled += count
    return filled
