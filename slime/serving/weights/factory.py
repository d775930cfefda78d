"""From the flags of weight movement to a `WeightSync`.

Invariant: the way is chosen by the rule of --update-weight-transport's help and nowhere else. Imported by the
trainer's processes; knows no trainer, and no engine's process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from slime.config.serving_sections import WeightsConfig
from slime.errors import ConfigError
from slime.serving.endpoint import EngineKind
from slime.serving.weights.client import WeightClient
from slime.serving.weights.distributed import DistributedTransport
from slime.serving.weights.engine_sync import EngineSync
from slime.serving.weights.layout import read_layout
from slime.serving.weights.outgoing import Transform, WireForm
from slime.serving.weights.shared import SharedWeights
from slime.serving.weights.sync import WeightSource, WeightSync
from slime.serving.weights.tensor import SharedFileTransport, TensorTransport
from slime.serving.weights.transport import Transport

TransportName: TypeAlias = Literal["tensor", "nccl", "disk", "lora"]


def choose_transport(config: WeightsConfig, *, one_machine: bool) -> TransportName:
    """The way that the flags ask for; without, disk for deltas, tensor on one machine, nccl across
    machines.
    """
    if config.update_weight_transport is not None:
        names: dict[str, TransportName] = {"tensor": "tensor", "nccl": "nccl", "disk": "disk", "lora": "lora"}
        return names[config.update_weight_transport]
    if config.update_weight_mode == "delta":
        return "disk"
    return "tensor" if one_machine else "nccl"


def make_weight_sync(
    config: WeightsConfig,
    *,
    source: WeightSource,
    engine_kind: EngineKind,
    hf_checkpoint: str,
    timeout: float,
    one_machine: bool,
    is_first: bool = True,
    shared: SharedWeights | None = None,
    aliases: bool = False,
    transform: Transform | None = None,
) -> WeightSync:
    """How this run moves weights. Made, and called, on every rank of the trainer.

    Args:
        source: the trainer; ``lora`` needs one that writes adapters (`AdapterSource`).
        engine_kind: of the engines that will be connected.
        hf_checkpoint: the folder that the engines serve: names, shapes and dtypes of what is sent.
        timeout: seconds of one update (--update-timeout).
        one_machine: trainer and engines share it; the default way is chosen by this.
        is_first: whether this rank talks to the engines.
        shared: the file that the trainer's weights live in, for embedded engines.
        aliases: embedded engines compute with that file instead of a copy; see `SharedFileTransport`.
        transform: makes quantised weights of the trainer's, as the checkpoint has them.

    Raises:
        ModelError: the checkpoint folder cannot be read.
    """
    transport = _transport(config, engine_kind, one_machine, shared, aliases)
    stored = read_layout(Path(hf_checkpoint)) if engine_kind == "sglang" else None

    def form(engine: WeightClient) -> WireForm:
        return WireForm(stored, engine.get("/server_info").get("dtype"), transform)

    return EngineSync(source, transport, form, is_first=is_first, timeout=timeout)


def _transport(
    config: WeightsConfig, kind: EngineKind, one_machine: bool, shared: SharedWeights | None, aliases: bool
) -> Transport:
    name = choose_transport(config, one_machine=one_machine)
    if name in ("disk", "lora"):
        raise ConfigError(f"{name} is not served yet", place="--update-weight-transport")
    if name == "nccl":
        return DistributedTransport(config.update_weight_buffer_size)
    if kind == "embedded":
        return SharedFileTransport(shared, aliases=aliases)
    return TensorTransport(config.update_weight_buffer_size)
