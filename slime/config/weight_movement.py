"""What the flags of weight movement need: the way that they come to, and the rules between them.

Invariant: the rule by which a way is chosen stands here alone; what needs another machine or GPU is decided
by who asks. Knows no torch, no engines and no transports.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from slime.config.problem import Problem
from slime.config.serving_sections import WeightsConfig

if TYPE_CHECKING:
    from slime.config import Config

ADAPTER = "slime"
"""What engines call the adapters of --update-weight-transport lora."""
TransportName: TypeAlias = Literal["tensor", "nccl", "disk", "lora"]
_DISK_DIR, _LOCAL_DIR = "--update-weight-disk-dir", "--update-weight-local-checkpoint-dir"
_TRANSPORT = "--update-weight-transport"
_CHECKSUM_PACKAGES = {"xxh3-128": "xxhash", "blake3": "blake3"}


def choose_transport(config: WeightsConfig, *, one_machine: bool) -> TransportName:
    """The way that the flags ask for; else disk for deltas, tensor on one machine, nccl across machines."""
    if config.update_weight_transport is not None:
        return cast(TransportName, config.update_weight_transport)
    if config.update_weight_mode == "delta":
        return "disk"
    return "tensor" if one_machine else "nccl"


def request_fields(args: Any) -> dict[str, Any]:
    """What each ``/generate`` of a run says besides, so that the weights that were moved answer it.

    Args:
        args: the flags by name.
    """
    adapters = getattr(args, "update_weight_transport", None) == "lora"
    is_sglang = getattr(args, "rollout_engine", None) == "sglang"
    return {"lora_path": ADAPTER} if adapters and is_sglang else {}


def frozen_urls(args: Any) -> frozenset[str]:
    """Base URLs of the models that take no weights of the trainer.

    Args:
        args: the flags by name, with the models that a run was connected to.
    """
    routers = getattr(args, "sglang_model_routers", None) or {}
    frozen = getattr(args, "sglang_frozen_models", ())
    return frozenset(f"http://{host}:{port}" for name, (host, port) in routers.items() if name in frozen)


def unused_by_weights(config: Config) -> list[tuple[str, object, str]]:
    """Dest, whether it is used, what it needs."""
    weights = config.weights
    moves = not (config.train_only or config.run.debug_rollout_only)
    way = choose_transport(weights, one_machine=True)
    is_delta = weights.update_weight_mode == "delta"
    files = f"{_TRANSPORT} disk or lora, or --update-weight-mode delta"
    is_sglang = config.serving.rollout_engine == "sglang"
    both = (
        "update_weight_mode",
        "update_weight_transport",
        "check_weight_update_equal",
    )
    return [
        *((dest, moves, "both an engine and a trainer") for dest in both),
        (
            "update_weights_interval",
            moves and config.overlaps and not config.is_fully_async,
            "--async-training: elsewhere every step is followed by an update",
        ),
        *(
            (dest, way in ("disk", "lora"), files)
            for dest in (
                "update_weight_disk_dir",
                "update_weight_disk_keep_files",
                "custom_update_weight_post_write_path",
            )
        ),
        ("update_weight_local_checkpoint_dir", way == "disk", f"{_TRANSPORT} disk, or deltas"),
        *(
            (dest, is_delta, "--update-weight-mode delta")
            for dest in ("update_weight_delta_encoding", "update_weight_delta_checksum")
        ),
        (
            "update_weight_buffer_size",
            way != "lora" and (way != "tensor" or is_sglang or weights.update_weight_transport is None),
            "weights that travel in buckets: not adapters, nor the shared file of the embedded engine",
        ),
    ]


def weight_movement(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    """What is missing for the way that was chosen, and what contradicts it."""
    weights, way = config.weights, config.weights.update_weight_transport
    is_delta = weights.update_weight_mode == "delta"
    if is_delta and way not in (None, "disk"):
        yield Problem(_TRANSPORT, f"{way} moves whole weights, and deltas go through files", "give disk")
    if (is_delta or way in ("disk", "lora")) and weights.update_weight_disk_dir is None:
        yield Problem(
            _DISK_DIR, "is required by this transport", "name a folder that trainer and engines see"
        )
    if is_delta and weights.update_weight_local_checkpoint_dir is None:
        yield Problem(
            _LOCAL_DIR, "is required: deltas are applied there", "name a folder of the engines' machine"
        )
    staleness, interval = config.rollout.max_staleness, weights.update_weights_interval
    if staleness is not None and staleness < interval:
        yield Problem(
            "--update-weights-interval",
            f"{interval} lets tokens be {interval} steps old, and --max-staleness is {staleness}",
            "lower it, or raise --max-staleness",
        )
    if is_delta:
        yield from _packages(weights.update_weight_delta_checksum)
    if way == "lora":
        yield from _adapters(config)


def _packages(checksum: str) -> Iterator[Problem]:
    for package in filter(None, ("zstandard", _CHECKSUM_PACKAGES.get(checksum))):
        if importlib.util.find_spec(package) is None:
            yield Problem(
                "--update-weight-mode", f"delta needs the package {package}", "pip install 'slime[delta]'"
            )


def _adapters(config: Config) -> Iterator[Problem]:
    if not config.train.lora_rank:
        yield Problem(_TRANSPORT, "lora moves adapters, and none are trained", "give --lora-rank")
    if config.serving.rollout_engine != "sglang":  # merged weights, as ever
        return
    if config.overlaps:
        yield Problem(
            _TRANSPORT,
            "lora cannot replace an adapter under rollouts that go on while training",
            "leave out --async-training, or choose another transport: it sends the merged weights",
        )
    if config.serving.rollout_external_engine_addrs is None and not config.sglang.get("enable_lora"):
        yield Problem(
            _TRANSPORT,
            "lora needs an SGLang that serves adapters",
            "give --sglang-enable-lora, --sglang-max-lora-rank and --sglang-lora-target-modules",
        )
