"""The layout of a run: its table, the order of bundles, and who sits on which."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.config import load_config
from slime.config.device_sharing import devices, share_devices
from slime.errors import ConfigError
from slime.ray.layout import (
    ENGINE_SHARE,
    TRAIN_SHARE,
    Bundle,
    EngineSlots,
    Mode,
    in_order,
    layout_of,
    seat,
)
from slime.ray.placement import layout_of_run

counts = st.integers(1, 16)


def bundles_of(*nodes, shuffle=0):
    """Bundles of nodes of these sizes, shuffled as Ray gives them."""
    places = [(node, gpu) for node, size in enumerate(nodes) for gpu in range(size)]
    random.Random(shuffle).shuffle(places)
    return [
        Bundle(index=index, node=f"id{node}", address=f"10.0.0.{node + 9}", gpu=str(gpu))
        for index, (node, gpu) in enumerate(places)
    ]


def seated(layout, sizes, bundles, ranks_per_node=1, gpus_per_node=8):
    """`sizes` of engines; negative ones are left free."""
    slots, first = [], layout.rollout_offset
    for size in sizes:
        if size > 0:
            slots.append(EngineSlots(name=f"default/regular-{len(slots)}", first=first, gpus=size))
        first += abs(size)
    return seat(layout, slots, bundles, ranks_per_node=ranks_per_node, gpus_per_node=gpus_per_node)


@pytest.mark.parametrize(
    ("mode", "bundles", "offset", "train", "rollout"),
    [
        (Mode.TRAIN_ONLY, 4, 0, 4, 0),
        (Mode.EXTERNAL, 4, 4, 4, 0),
        (Mode.ROLLOUT_ONLY, 6, 0, 0, 6),
        (Mode.COLOCATE, 6, 0, 4, 6),
        (Mode.SEPARATE, 10, 4, 4, 6),
    ],
)
def test_the_table_of_layouts(mode, bundles, offset, train, rollout):
    layout = layout_of(mode, train_gpus=4, rollout_gpus=6)
    assert (layout.bundles, layout.rollout_offset) == (bundles, offset)
    assert (layout.train_gpus, layout.rollout_gpus) == (train, rollout)


@given(st.sampled_from(Mode), counts, counts)
def test_trainer_and_engines_lie_within_the_bundles(mode, train, rollout):
    layout = layout_of(mode, train_gpus=train, rollout_gpus=rollout)
    assert layout.train_gpus <= layout.bundles
    assert layout.rollout_offset + layout.rollout_gpus <= layout.bundles
    ends = (layout.train_gpus, layout.rollout_offset + layout.rollout_gpus)
    assert max(ends) == layout.bundles
    if mode is Mode.SEPARATE:
        assert layout.train_gpus <= layout.rollout_offset


def test_a_trainer_a_critic_and_an_engine_fit_on_a_gpu_and_no_second_engine_does():
    assert TRAIN_SHARE * 2 + ENGINE_SHARE <= 1
    assert TRAIN_SHARE * 2 + ENGINE_SHARE * 2 > 1


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 99))
def test_neighbours_in_order_are_neighbours_in_the_machine(nodes, seed):
    ordered = in_order(bundles_of(*nodes, shuffle=seed))
    places = [(bundle.node, bundle.gpu) for bundle in ordered]
    assert places == [(f"id{node}", str(gpu)) for node, size in enumerate(nodes) for gpu in range(size)]


def test_addresses_are_sorted_as_numbers_and_names_after_them():
    def at(address):
        return Bundle(index=0, node="n" + address, address=address, gpu="0")

    ordered = in_order([at("host-b"), at("10.0.0.10"), at("10.0.0.9"), at("host-a")])
    assert [bundle.address for bundle in ordered] == ["10.0.0.9", "10.0.0.10", "host-a", "host-b"]


@given(
    st.sampled_from([Mode.COLOCATE, Mode.SEPARATE, Mode.ROLLOUT_ONLY]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8, 12]),
    st.integers(0, 99),
)
def test_every_gpu_has_one_engine_at_most_and_every_engine_one_node_or_whole_ones(
    mode, train_nodes, number, size, seed
):
    """The trainer takes whole nodes of 4, and so do engines together with what is before them."""
    layout = layout_of(mode, train_gpus=4 * train_nodes, rollout_gpus=number * size)
    nodes = [4] * -(-layout.bundles // 4)
    bundles = bundles_of(*nodes, shuffle=seed)[: sum(nodes)]
    seating = seated(layout, [size] * number, bundles, 4, 4)
    assert len(seating.engines) == number
    taken = [bundle.index for one in seating.engines for bundle in one.bundles]
    assert len(taken) == len(set(taken)) == number * size
    for one in seating.engines:
        sizes = [len(part) for part in one.parts]
        assert sizes == [size] if size <= 4 else sizes == [4] * (size // 4)
    assert len({bundle.index for bundle in seating.train}) == layout.train_gpus
    if mode is Mode.SEPARATE:
        assert not set(taken) & {bundle.index for bundle in seating.train}


def test_an_engine_that_would_straddle_two_nodes_is_refused_with_the_remedy():
    layout = layout_of(Mode.ROLLOUT_ONLY, train_gpus=0, rollout_gpus=9)
    with pytest.raises(ConfigError) as caught:
        seated(layout, [3, 3, 3], bundles_of(8, 8))
    text = str(caught.value)
    assert "engine default/regular-2 of 3 GPUs: would be split: 2 on 10.0.0.9, 1 on 10.0.0.10" in text
    assert "--rollout-num-gpus-per-engine divide 8" in text


def test_an_engine_over_parts_of_two_nodes_is_refused_though_they_are_equal():
    layout = layout_of(Mode.ROLLOUT_ONLY, train_gpus=0, rollout_gpus=4)
    with pytest.raises(ConfigError, match="2 on 10.0.0.9, 2 on 10.0.0.10. An engine sits on one node or"):
        seated(layout, [4], bundles_of(2, 2))


def test_engines_behind_an_odd_trainer_are_told_why_they_are_split():
    layout = layout_of(Mode.SEPARATE, train_gpus=1, rollout_gpus=4)
    with pytest.raises(ConfigError, match="engines begin behind 1 of training"):
        seated(layout, [2, 2], bundles_of(2, 3), gpus_per_node=2)


def test_ranks_that_meet_on_one_machine_are_not_spread_over_two():
    layout = layout_of(Mode.TRAIN_ONLY, train_gpus=3, rollout_gpus=0)
    with pytest.raises(ConfigError, match=r"train ranks 0 to 2 are on 2 nodes: 10.0.0.9, 10.0.0.10"):
        seated(layout, [], bundles_of(2, 1), ranks_per_node=3)


def test_gpus_between_engines_can_stay_free():
    layout = layout_of(Mode.SEPARATE, train_gpus=1, rollout_gpus=7)
    seating = seated(layout, [-1, 2, 4], bundles_of(4, 4, shuffle=5), gpus_per_node=4)
    assert [(one.name, [b.gpu for b in one.bundles]) for one in seating.engines] == [
        ("default/regular-0", ["2", "3"]),
        ("default/regular-1", ["0", "1", "2", "3"]),
    ]


def test_engines_stay_within_the_gpus_of_rollouts():
    layout = layout_of(Mode.SEPARATE, train_gpus=2, rollout_gpus=2)
    slots = EngineSlots(name="a", first=1, gpus=2)
    with pytest.raises(ConfigError, match="engine a of 2 GPUs: takes the GPUs from number 1 on"):
        seat(layout, [slots], bundles_of(4), ranks_per_node=2, gpus_per_node=4)
    with pytest.raises(ConfigError, match="engines have those from 2 to 3"):
        seated(layout, [1, 2], bundles_of(4), 2)


@pytest.mark.parametrize(
    ("words", "mode", "bundles"),
    [
        ("", Mode.SEPARATE, 2),
        ("--colocate", Mode.COLOCATE, 1),
        ("--debug-rollout-only --rollout-num-gpus 3", Mode.ROLLOUT_ONLY, 3),
        ("--load-debug-rollout-data x", Mode.TRAIN_ONLY, 1),
        ("--rollout-external-engine-addrs h:1", Mode.EXTERNAL, 1),
    ],
)
def test_flags_give_the_layout(tmp_path, words, mode, bundles):
    config = load_config(
        ["--hf-checkpoint", str(tmp_path), "--rollout-batch-size", "2", *words.split()], checks=[devices]
    )
    layout = layout_of_run(config, share_devices(config))
    assert (layout.mode, layout.bundles) == (mode, bundles)
