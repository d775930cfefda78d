"""Who takes how many GPUs, and who gives up its memory for whom: what the flags of devices come to.

Invariant: no other module reads ``--colocate``, ``--offload...`` or the default of ``--rollout-num-gpus``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.problem import Problem, dashed

if TYPE_CHECKING:
    from slime.config import Config

OFFLOADS = ("offload", "offload_train", "offload_rollout")


@dataclass(frozen=True, kw_only=True)
class DeviceSharing:
    """Attributes:
    train_gpus: of the trainer, all nodes together; 0 without one.
    rollout_gpus: of our own engines; 0 without any.
    colocate: both on the same GPUs.
    offload_train: the trainer sleeps during rollouts.
    offload_rollout: engines give up their memory during training.
    """

    train_gpus: int
    rollout_gpus: int
    colocate: bool
    offload_train: bool
    offload_rollout: bool


def share_devices(config: Config, *, on_gpus: bool = True) -> DeviceSharing:
    """What the flags come to.

    A given ``--offload-...`` or ``--no-offload-...`` wins, then ``--offload``, then ``--colocate``. Where
    rollouts and training overlap nobody sleeps.

    Args:
        on_gpus: False on the CPUs of one machine, whose memory engine and trainer share in any case: both
            offload unless told not to.
    """
    serving, train = config.serving, config.train
    generates, trains = not config.train_only, not config.run.debug_rollout_only
    external = serving.rollout_external_engine_addrs is not None
    train_gpus = train.actor_num_nodes * train.actor_num_gpus_per_node if trains else 0
    both = generates and trains
    colocate = serving.colocate and both
    takes_turns = both and not config.overlaps
    default = takes_turns and (serving.colocate or serving.offload or not on_gpus)
    rollout_gpus = serving.rollout_num_gpus
    if rollout_gpus is None:
        rollout_gpus = train_gpus if colocate else serving.rollout_num_gpus_per_engine
    return DeviceSharing(
        train_gpus=train_gpus,
        rollout_gpus=0 if external or not generates else rollout_gpus,
        colocate=colocate,
        offload_train=takes_turns and _or(serving.offload_train, default),
        offload_rollout=takes_turns and not external and _or(serving.offload_rollout, default),
    )


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def devices(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    """Combinations of these flags that cannot be."""
    serving = config.serving
    for dest in ("offload_train", "offload_rollout"):
        if serving.offload and getattr(serving, dest) is False:
            yield Problem("--offload", f"contradicts --no-{dashed(dest)[2:]}", "give one of them")
    for dest in ("colocate", *OFFLOADS):
        if config.overlaps and getattr(serving, dest):
            yield Problem(
                dashed(dest),
                "lets engines and trainer take turns, and these rollouts go on while the trainer trains",
                "leave one of them out",
            )
    external = serving.rollout_external_engine_addrs is not None
    for dest in ("colocate", "offload", "offload_rollout"):
        if external and getattr(serving, dest):
            yield Problem(
                dashed(dest), "is not for external engines: they are used as found", "--offload-train alone"
            )
    total, size = serving.rollout_num_gpus, serving.rollout_num_gpus_per_engine
    if total is not None and total % size and serving.sglang_config is None:
        yield Problem(
            "--rollout-num-gpus",
            f"{total} does not divide by --rollout-num-gpus-per-engine {size}",
            "let it be a multiple of it",
        )
    if config.engine.port is not None and (total or 1) > size:
        yield Problem(
            "--engine-port",
            f"{config.engine.port} is one port, and --rollout-num-gpus {total} makes several engines",
            "leave it out: each takes a free port; --sglang-router-port is that of the router before them",
        )
    if "rollout_num_gpus" not in given and serving.colocate and not external:
        yield from _colocated_default(config)


def _colocated_default(config: Config) -> Iterator[Problem]:
    size, gpus = config.serving.rollout_num_gpus_per_engine, share_devices(config).rollout_gpus
    if gpus % size and config.serving.sglang_config is None:
        yield Problem(
            "--rollout-num-gpus-per-engine",
            f"{size} does not divide the {gpus} GPUs of the trainer, which engines get by --colocate",
            "give another size, or --rollout-num-gpus",
        )
