"""What serves a run, by its flags."""

from dataclasses import replace

import pytest

from slime.config import load_config
from slime.config.device_sharing import share_devices
from slime.config.weight_movement import choose_transport, request_fields
from slime.errors import ConfigError
from slime.ray.placement import layout_of_run
from slime.ray.serving import EVALUATION, ROLLOUT, ServingPlan, of_kind, plan_serving
from slime.serving.external import Expected, discover
from slime.serving.topology import ServedModel, ServerGroup, Topology, single_model
from slime.serving.topology_flags import topology_of_run
from tests.ray.routing import words
from tests.serving.routing import engines


def plan_of(config, kind="embedded", **values):
    """What `plan_serving` makes of it, without a cluster."""
    topology, _ = topology_of_run(config)
    sharing = share_devices(config)
    plan = ServingPlan(
        config=config,
        kind=kind,
        sharing=sharing,
        layout=layout_of_run(config, sharing),
        is_placed=False,
        topology=topology,
    )
    return replace(plan, **values)


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
    plan = plan_of(load_config([*words(tmp_path), *flags.split()]), is_placed=is_placed)
    assert choose_transport(plan.config.weights, one_machine=plan.way(pool).one_machine) == way


def test_the_engines_of_the_default_model_that_decode_share_its_rollouts(tmp_path):
    plan = plan_of(load_config(words(tmp_path)))
    actor = single_model("models/actor", num_gpus=6, prefill_engines=2)
    judge = ServedModel(
        name="judge",
        model_path="models/judge",
        groups=(ServerGroup(worker_type="regular", num_gpus=3),),
    )
    assert plan.sharers == 1
    assert replace(plan, topology=single_model("models/actor", num_gpus=3)).sharers == 3
    assert replace(plan, topology=Topology(models=(*actor.models, judge))).sharers == 4


def test_engines_of_others_share_the_rollouts_too(tmp_path):
    with engines(2) as servers:
        flags = [server.url.removeprefix("http://") for server in servers]
        config = load_config([*words(tmp_path), "--rollout-external-engine-addrs", *flags])
        assert plan_of(config, externals=discover(flags, Expected())).sharers == 2


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


MORE = "--colocate --rollout-num-gpus 2"
DISK = "--update-weight-transport disk --update-weight-disk-dir weights"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            MORE,
            r"of 2 GPUs \(trainer 1, engines 2; colocate\): nccl takes no two(.|\n)*--rollout-num-gpus 1 at",
        ),
        (f"{MORE} --update-weight-transport tensor", "tensor reaches no engine on GPUs that the trainer"),
        ("--colocate --update-weight-transport nccl", "nccl takes no two ranks(.|\n)*or leave it out"),
    ],
)
def test_engines_that_no_weights_would_reach_on_shared_gpus_are_refused(tmp_path, flags, reason):
    config = load_config([*words(tmp_path), *flags.split(), "--place-on-gpus"])
    with pytest.raises(ConfigError, match=f"--colocate: weights cannot go(.|\n)*{reason}"):
        plan_serving(config)


@pytest.mark.parametrize(
    "flags",
    [
        f"{MORE} {DISK} --place-on-gpus",
        f"{MORE} --no-place-on-gpus",
        "--colocate --place-on-gpus",
        "--rollout-num-gpus 2 --place-on-gpus",
    ],
)
def test_engines_that_weights_reach_are_not(tmp_path, flags):
    assert plan_serving(load_config([*words(tmp_path), *flags.split()])).specs


def test_models_that_take_no_weights_are_known(tmp_path):
    topology = tmp_path / "topology.yaml"
    groups = "server_groups: [{worker_type: regular, num_gpus: 1}]"
    topology.write_text(
        f"sglang:\n- {{name: actor, {groups}}}\n- {{name: judge, model_path: other, {groups}}}\n"
    )
    flags = ["--sglang-config", str(topology), "--rollout-engine", "embedded", "--no-place-on-gpus"]
    assert plan_serving(load_config([*words(tmp_path), *flags])).frozen == ("judge",)
