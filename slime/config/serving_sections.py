"""Sections of what serves rollouts: engines and their router, how weights reach them, what watches them.

Field names are the names on `args`. Knows nothing of parsing or files.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Engines and the router before them."""

    rollout_engine: str | None = flag(
        None,
        "embedded, or sglang (default: sglang where it is installed and a GPU is present, or where a flag of "
        "it is given)",
        "str",
        choices=["embedded", "sglang"],
    )
    sglang_python: str | None = flag(
        None, "Python interpreter whose environment holds sglang and sglang-router (default: this one)", "str"
    )
    rollout_num_gpus: int | None = flag(
        None,
        "GPUs for engines, all together (default: one engine; with --colocate those of the trainer); 0 "
        "starts the router only",
        "int",
        at_least=0,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "GPUs of one engine: its tensor times its pipeline parallel size", "int", at_least=1
    )
    num_gpus_per_node: int = flag(
        8, "GPUs of one machine; an engine with more than one machine's takes all of each", "int", at_least=1
    )
    place_on_gpus: bool | None = flag(
        None,
        "take GPUs of the Ray cluster, waiting for them up to --phase-timeout; --no-place-on-gpus runs on "
        "CPUs (default: where the cluster has GPUs)",
        "tri",
    )
    sglang_config: str | None = flag(
        None, "YAML of models, each with its router and its groups of servers", "str"
    )
    prefill_num_servers: int | None = flag(
        None, "engines that only prefill; the others then only decode", "int", at_least=1
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None, "host:port of servers that run already; they are used as found", "strs"
    )
    sglang_router_ip: str | None = flag(None, "address of a router that runs already", "str")
    sglang_router_port: int | None = flag(
        None, "its port; alone: the port of the router that is started", "int", at_least=1, at_most=65535
    )
    sglang_router_request_timeout_secs: int = flag(
        14400, "deadline of one request at the router in seconds", "int", at_least=1
    )
    colocate: bool = flag(
        False, "engines and trainer take turns on the same GPUs; implies both --offload flags", "switch"
    )
    offload: bool = flag(False, "--offload-train and --offload-rollout", "switch")
    offload_train: bool | None = flag(
        None,
        "during rollouts keep the trainer's weights and the optimizer's state on the host, and give up the "
        "rest of its GPU memory",
        "tri",
    )
    offload_rollout: bool | None = flag(None, "free the engines' GPU memory during training", "tri")
    use_fault_tolerance: bool = flag(
        False, "watch the engines' health and replace those that fail before the next weight update", "switch"
    )
    rollout_health_check_interval: float = flag(30.0, "seconds between health checks", "float", above=0)
    rollout_health_check_timeout: float = flag(30.0, "deadline of one in seconds", "float", above=0)
    rollout_health_check_first_wait: float = flag(
        0.0, "seconds without checks after a start or a pause", "float", at_least=0
    )
    rollout_engine_restarts: int = flag(
        3, "times that each engine is replaced before its next failure ends the run", "int", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """How weights travel from the trainer to the engines."""

    update_weight_mode: str = flag(
        "full", "all weights, or the bytes that changed", "str", choices=["full", "delta"]
    )
    update_weight_transport: str | None = flag(
        None,
        "tensor: shared memory (CUDA IPC on GPUs) on one machine; nccl: a process group (gloo on CPU); disk: "
        "a folder that trainer and engines see; lora: the adapters alone, as files (default: tensor where "
        "they share the machine, else nccl; disk for delta)",
        "str",
        choices=["tensor", "nccl", "disk", "lora"],
    )
    update_weight_buffer_size: int = flag(
        512 * 1024**2, "bytes of weights that travel at once", "int", at_least=1
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder of --update-weight-transport disk and lora", "str"
    )
    update_weight_disk_keep_files: bool = flag(False, "keep each version in that folder", "switch")
    update_weight_delta_encoding: str = flag(
        "xor", "encoding of changed bytes", "str", choices=["xor", "overwrite"]
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128", "checksum of each tensor", "str", choices=["xxh3-128", "blake3", "adler32"]
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None, "folder of the engine's machine that deltas are applied in, and engines load from", "str"
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "hook (args, version_dir, rollout_engines) after a version of the weights is written to disk",
        "str",
    )
    update_weights_interval: int = flag(
        1,
        "with --async-training: rollout steps between weight updates; an evaluation makes one of its own",
        "int",
        at_least=1,
    )
    check_weight_update_equal: bool = flag(
        False,
        "after the first update, compare the engine's weights or its log-probs with the trainer's",
        "switch",
    )
