"""What serves a run, by its flags."""

import pytest

from slime.config import load_config
from slime.config.device_sharing import share_devices
from slime.config.weight_movement import choose_transport, request_fields
from slime.errors import ConfigError
from slime.ray.placement import layout_of_run
from slime.ray.serving import EVALUATION, ROLLOUT, ServingPlan, of_kind
from slime.serving.topology_flags import topology_of_run
from tests.ray.routing import words


@pytest.mark.parametrize(
    ("flags", "is_placed", "pool", "way"),
    [
        ("", False, ROLLOUT, "tensor"),
        ("", True, ROLLOUT, "nccl"),
        ("--colocate", True, ROLLOUT, "tensor"),
        ("--colocate", True, EVALUATION, "nccl"),
        ("--colocate --rollout-num-gpus 2", True, ROLLOUT, "nccl"),
    ],
)
def test_engines_on_the_trainers_gpus_get_weights_through_memory(tmp_path, flags, is_placed, pool, way):
    config = load_config([*words(tmp_path), *flags.split()])
    topology, _ = topology_of_run(config)
    sharing = share_devices(config)
    plan = ServingPlan(
        config=config,
        kind="embedded",
        sharing=sharing,
        layout=layout_of_run(config, sharing),
        is_placed=is_placed,
        topology=topology,
    )
    assert choose_transport(config.weights, one_machine=plan.way(pool).one_machine) == way


LORA = (
    "--update-weight-transport lora --lora-rank 4 --update-weight-disk-dir d "
    "--rollout-external-engine-addrs h:1"
)


def test_adapters_are_named_by_requests_to_external_engines_that_take_them(tmp_path):
    flags = [*words(tmp_path), *LORA.split()]
    assert request_fields(of_kind(load_config(flags), "sglang").args()) == {"lora_path": "slime"}
    assert request_fields(of_kind(load_config(flags), "embedded").args()) == {}
    overlapping = load_config([*flags, "--async-training"])
    with pytest.raises(ConfigError, match="lora cannot replace an adapter under rollouts that go on"):
        of_kind(overlapping, "sglang")
