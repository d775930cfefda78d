"""The topology of a run, from its flags: a file, prefilling servers by their number, or alike engines.

Invariant: the same flags give the same topology, and one that cannot be laid out is refused with the flag
that says so. Knows neither processes nor GPUs.
"""

from __future__ import annotations

from slime.config import Config
from slime.config.device_sharing import share_devices
from slime.config.passthrough import installed_version, table_of
from slime.config.problem import Problem
from slime.config.serving_sections import ServingConfig
from slime.errors import ConfigError
from slime.serving.overrides import EmbeddedRules, OverrideRules, SglangRules
from slime.serving.topology import Topology, single_model
from slime.serving.topology_yaml import Given, read_topology


def topology_of(
    serving: ServingConfig,
    *,
    model_path: str | None,
    default_gpus: int = 1,
    trains: bool = True,
    in_run: bool = True,
) -> tuple[Topology, list[Problem]]:
    """The topology that flags say, and warnings.

    Args:
        model_path: --hf-checkpoint.
        default_gpus: GPUs of the engines where --rollout-num-gpus does not say it.
        trains: whether a trainer sends weights.
        in_run: whether it serves a run.

    Raises:
        ConfigError: what cannot be laid out; of a file, all that is wrong with it.
    """
    rules = _rules_of(serving, in_run=in_run)
    if serving.sglang_config is not None:
        given = Given(
            model_path=model_path,
            rules=rules,
            num_gpus=serving.rollout_num_gpus,
            num_gpus_per_engine=serving.rollout_num_gpus_per_engine,
            trains=trains,
        )
        return read_topology(serving.sglang_config, given)
    if model_path is None:
        raise ConfigError("engines need a model", place="--hf-checkpoint", remedy="name its folder")
    gpus = default_gpus if serving.rollout_num_gpus is None else serving.rollout_num_gpus
    _check_counts(serving, gpus, rules)
    topology = single_model(
        model_path,
        num_gpus=gpus,
        num_gpus_per_engine=serving.rollout_num_gpus_per_engine,
        prefill_engines=serving.prefill_num_servers or 0,
    )
    return topology, []


def topology_of_run(config: Config) -> tuple[Topology, list[Problem]]:
    """The topology that a run starts, and warnings; one without engines where it has none of its own.

    Raises:
        ConfigError: as `topology_of`.
    """
    serving = config.serving
    if config.train_only or serving.rollout_external_engine_addrs is not None:
        return single_model(config.model.hf_checkpoint or "", num_gpus=0), []
    return topology_of(
        serving,
        model_path=config.model.hf_checkpoint,
        default_gpus=share_devices(config).rollout_gpus,
        trains=not config.run.debug_rollout_only,
    )


def _rules_of(serving: ServingConfig, *, in_run: bool) -> OverrideRules:
    """What engines of the kind may be told."""
    if serving.rollout_engine != "sglang":
        return EmbeddedRules()
    python = serving.sglang_python
    is_installed = installed_version("sglang", python) is not None
    return SglangRules(table_of("sglang", python) if is_installed else None, in_run=in_run)


def _check_counts(serving: ServingConfig, gpus: int, rules: OverrideRules) -> None:
    size, prefill = serving.rollout_num_gpus_per_engine, serving.prefill_num_servers
    kinds = ("prefill", "decode") if prefill else ("regular",)
    complaints = [
        ("--rollout-num-gpus-per-engine", rules.size(size)),
        *(("--prefill-num-servers", rules.worker_type(kind)) for kind in kinds),
    ]
    for place, complaint in complaints:
        if complaint is not None:
            raise ConfigError(complaint[0], place=place, remedy=complaint[1])
    if gpus % size:
        raise ConfigError(
            f"{gpus} GPUs do not divide into engines of {size}",
            place="--rollout-num-gpus",
            remedy="a multiple of --rollout-num-gpus-per-engine",
        )
    if prefill and prefill * size >= gpus:
        raise ConfigError(
            f"{prefill} engines of {size} GPUs leave none of {gpus} GPUs to decode",
            place="--prefill-num-servers",
            remedy="lower it, or raise --rollout-num-gpus",
        )
