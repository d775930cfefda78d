"""The tables of flags are those of the installed programs, and slime's own choices are in them."""

from dataclasses import replace

import pytest

from slime.config.flags import Flag
from slime.config.passthrough import MANAGED, table_of
from slime.errors import ConfigError
from slime.serving.sglang.command import EngineLaunch
from tests.sglang.servers import NEWER, PYTHONS, VERSIONS

LAUNCH = EngineLaunch(
    model_path="m", host="127.0.0.1", port=1, seed=3, tp_size=2, pp_size=2, nnodes=2, node_rank=1,
    dist_init_addr="h:1", nccl_port=5, base_gpu_id=4, memory_saver=True, return_routed_experts=True,
)  # fmt: skip


@pytest.fixture(scope="module", params=VERSIONS)
def table(request):
    return table_of("sglang", PYTHONS[request.param])


def test_the_table_is_the_versions_own(table):
    assert table.version in VERSIONS
    assert len(table.by_field) > 400
    assert ("enable_dsa_fused_indexer" in table.by_field) == (table.version == NEWER)


def test_defaults_are_values_of_their_flags(table):
    for row in table.usable():
        assert isinstance(row, Flag)
        if row.default is not None and row.dest != "sglang_enable_amd_monokernel":
            row.check(row.default, row.name)


def test_every_flag_that_slime_sets_is_one(table):
    assert set(MANAGED["sglang"]) <= set(table.by_field)


def test_a_launch_has_a_word_for_each_decision(table):
    words = LAUNCH.words(table)
    for word in (
        *("--model-path=m", "--host=127.0.0.1", "--port=1", "--random-seed=3", "--nnodes=2", "--node-rank=1"),
        *("--dist-init-addr=h:1", "--nccl-port=5", "--base-gpu-id=4", "--enable-memory-saver"),
        *(
            "--trust-remote-code",
            "--skip-server-warmup",
            "--enable-return-routed-experts",
            "--enable-metrics",
        ),
    ):
        assert word in words
    assert {"--tp-size=2", "--tensor-parallel-size=2"} & set(words)
    assert {"--pp-size=2", "--pipeline-parallel-size=2"} & set(words)


def test_weights_that_are_released_are_kept_on_the_host(table):
    assert "--enable-weights-cpu-backup" in LAUNCH.words(table)
    assert "--enable-weights-cpu-backup" not in replace(LAUNCH, memory_saver=False).words(table)
    given = replace(LAUNCH, overrides={"enable_weights_cpu_backup": False})
    assert "--enable-weights-cpu-backup" not in given.words(table)


def test_no_port_is_too_high_for_older_versions(table):
    needs = table.version != NEWER
    assert LAUNCH.environment(table) == ({"SGLANG_GRPC_PORT": "1"} if needs else {})


def test_a_misspelt_override_names_the_nearest(table):
    launch = EngineLaunch(model_path="m", host="h", port=1, seed=3, overrides={"mem-fraction-statik": 0.5})
    with pytest.raises(ConfigError, match="mem_fraction_static"):
        launch.words(table)


def test_flags_that_slime_sets_of_the_router_are_flags_of_it():
    assert set(MANAGED["router"]) <= set(table_of("router", PYTHONS[NEWER]).by_field)
