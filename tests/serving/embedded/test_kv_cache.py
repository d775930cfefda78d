"""Arenas keep every sequence's keys and values through growth, moves and removals."""

import mmap
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.serving.embedded.attention import AttentionOptions, DecodeGroup
from slime.serving.embedded.kv_cache import SMALLEST_CLASS, Arena, KVCache, KVShape

SHAPE = KVShape(layers=2, kv_heads=2, dim=4, dtype=torch.float32)


def stretch(value, tokens):
    """Recognisable memory: owner in the integer part, position behind it."""
    memory = SHAPE.buffer(tokens)
    memory[:] = value + torch.arange(tokens)[:, None] / 4096
    return memory


def holes(cache):
    return [
        place.slot
        for arena, places in cache.groups()
        for slot, place in enumerate(places)
        if place.slot != slot or place.arena is not arena
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 600)),
            st.tuples(st.just("grow"), st.integers(0, 50)),
            st.tuples(st.just("remove"), st.integers(0, 50)),
        ),
        max_size=25,
    ),
    st.sampled_from([300, 2**20]),
)
def test_contents_survive_any_sequence_of_changes(actions, capacity):
    cache, live, count = KVCache(SHAPE, 2048, slots=3, capacity=capacity), [], 0
    for action, number in actions:
        if action == "add":
            count += 1
            live.append((count, cache.add(count, [stretch(count, number)])))
        elif live:
            value, place = live[number % len(live)]
            if action == "remove":
                live.remove((value, place))
                cache.remove(place)
            else:
                filled = place.arena.length
                place.arena.slot(place.slot)[:, :, :, :filled] = stretch(value, filled)
                place.filled = filled
                cache.make_room(place)
                assert place.arena.length > filled
        assert not holes(cache)
        for value, place in live:
            assert torch.equal(cache.read(place, 0, place.filled), stretch(value, place.filled))


def test_decode_rows_land_behind_each_sequence():
    cache = KVCache(SHAPE, 512)
    places = [cache.add(i, [stretch(i, length)]) for i, length in enumerate((3, 250, 17))]
    (arena, owners), *_ = cache.groups()
    positions = torch.tensor([place.filled for place in owners])
    keys = torch.arange(3 * 2 * 4.0).view(6, 4)
    for layer in range(SHAPE.layers):
        arena.write_rows(layer, arena.row_index(positions), keys + layer, -keys)
    for i, place in enumerate(places):
        token = cache.read(place, place.filled, place.filled + 1)[:, :, :, 0]
        assert torch.equal(token[1, 0], keys[2 * i : 2 * i + 2] + 1)
        assert torch.equal(token[0, 1], -keys[2 * i : 2 * i + 2])
    view, _ = arena.view(0, 3, 20)
    assert view.shape == (6, 20, 4)
    assert view.data_ptr() == arena.memory.data_ptr()


def test_classes_double_and_end_at_the_context():
    cache = KVCache(SHAPE, 700)
    lengths = [cache.add(None, [stretch(0, n)]).arena.length for n in (1, 255, 256, 511, 512, 699)]
    assert lengths == [SMALLEST_CLASS, 256, 512, 512, 700, 700]


def test_memory_that_others_left_behind_reaches_no_sequence():
    size = SHAPE.layers * 2 * 2 * SHAPE.kv_heads * SMALLEST_CLASS * SHAPE.dim
    poison = [torch.full((size,), float("nan")) for _ in range(8)]
    poison.clear()
    cache = KVCache(SHAPE, 512, slots=2)
    for length in (3, 250):
        cache.add(length, [stretch(length, length)])
    assert decode(cache).isfinite().all()


def test_a_wiped_slot_harms_no_later_owner():
    cache = KVCache(SHAPE, 512, slots=2)
    places = [cache.add(i, [stretch(i, 200)]) for i in range(2)]
    slot = places[1].arena.slot(1)
    slot[:, :, :, :201] = float("nan")
    cache.wipe(places[1])
    cache.remove(places[1])
    cache.add(2, [stretch(2, 3)])
    assert decode(cache).isfinite().all()


def decode(cache):
    """Attention of a new token of every sequence of the first arena."""
    (arena, places), *_ = cache.groups()
    positions = torch.tensor([place.filled for place in places])
    group = DecodeGroup(arena, positions, int(positions.max()) + 1)
    rows = torch.ones(len(places), SHAPE.kv_heads, SHAPE.dim)
    return group.attend(0, rows, rows, rows, AttentionOptions(1.0, None, None))


def test_memory_not_written_to_costs_nothing():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    arena = Arena(SHAPE, 2**20)
    arena.renew(8, 0, 0)
    assert arena.memory.nbytes == 2**30
    assert resident() - before < 2**26
