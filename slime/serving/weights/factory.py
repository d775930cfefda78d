"""From the flags of weight movement to a `WeightSync`.

Invariant: a transport gets only what its way needs; the way is chosen in slime.config. Imported by the
trainer's processes; knows no trainer, and no engine's process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from slime.config.serving_sections import WeightsConfig
from slime.config.weight_movement import TransportName, choose_transport
from slime.errors import ConfigError
from slime.serving.endpoint import EngineKind
from slime.serving.weights.client import WeightClient
from slime.serving.weights.delta.encoding import Encoding
from slime.serving.weights.delta.publisher import DeltaPublisher
from slime.serving.weights.disk import AfterWrite, DiskTransport, Publisher
from slime.serving.weights.distributed import DistributedTransport
from slime.serving.weights.engine_sync import EngineSync
from slime.serving.weights.full import FullPublisher
from slime.serving.weights.layout import read_layout
from slime.serving.weights.lora import LoraTransport
from slime.serving.weights.names import chained, checkpoint_names
from slime.serving.weights.outgoing import Transform, WireForm
from slime.serving.weights.probe import Probe
from slime.serving.weights.quantise import quantiser_of, read_config
from slime.serving.weights.shared import SharedWeights
from slime.serving.weights.sync import WeightSource, WeightSync
from slime.serving.weights.tensor import SharedFileTransport, TensorTransport
from slime.serving.weights.transport import Transport


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
    after_write: AfterWrite | None = None,
    probe: Probe | None = None,
) -> WeightSync:
    """How this run moves weights. Made, and called, on every rank of the trainer.

    Args:
        source: the trainer; ``lora`` needs one that writes adapters (`AdapterSource`).
        engine_kind: of the engines that will be connected.
        hf_checkpoint: the folder that the engines serve: names, shapes, dtypes and quantisation of what is
            sent.
        timeout: seconds of one update (--update-timeout).
        one_machine: trainer and engines share it; the default way is chosen by this.
        is_first: whether this rank talks to the engines.
        shared: the file that the trainer's weights live in, for embedded engines.
        aliases: embedded engines compute with that file instead of a copy; see `SharedFileTransport`.
        after_write: the hook of --custom-update-weight-post-write-path, its `args` bound.
        probe: compares engines with the trainer after their first update (--check-weight-update-equal).

    Raises:
        ModelError: the checkpoint folder cannot be read, or its quantisation is not supported.
        ConfigError: a folder that the way needs is not given, or a package is missing.
    """
    run = _Run(config, source, engine_kind, Path(hf_checkpoint), shared, aliases, after_write)
    name = choose_transport(config, one_machine=one_machine)
    return EngineSync(
        source, run.transport(name), run.form(name), is_first=is_first, timeout=timeout, probe=probe
    )


@dataclass(frozen=True)
class _Run:
    config: WeightsConfig
    source: WeightSource
    kind: EngineKind
    checkpoint: Path
    shared: SharedWeights | None
    aliases: bool
    after_write: AfterWrite | None

    def transport(self, name: TransportName) -> Transport:
        """The way of this name."""
        if name == "disk":
            return self._disk()
        if name == "nccl":
            return DistributedTransport(self.config.update_weight_buffer_size)
        if name == "lora" and self.kind == "sglang":
            return LoraTransport(
                self.source,
                self._root(),
                keeps_files=self.config.update_weight_disk_keep_files,
                after_write=self.after_write,
            )
        if self.kind == "embedded":
            return SharedFileTransport(self.shared, aliases=self.aliases)
        return TensorTransport(self.config.update_weight_buffer_size)

    def form(self, name: TransportName) -> Callable[[WeightClient], WireForm]:
        """How engines want weights: as in the checkpoint. The embedded engine takes the trainer's names, and
        checks them; a delta is one to the checkpoint's own bytes."""
        if self.kind == "embedded" and name != "disk":
            return lambda engine: WireForm(None, engine.get("/server_info").get("dtype"))
        stored = read_layout(self.checkpoint)
        quantiser: Transform = quantiser_of(read_config(self.checkpoint), stored.keys())
        transform = chained(checkpoint_names(self.checkpoint), quantiser)
        if self.config.update_weight_mode == "delta":
            return lambda engine: WireForm(stored, None, transform)
        return lambda engine: WireForm(stored, engine.get("/server_info").get("dtype"), transform)

    def _root(self) -> Path:
        if self.config.update_weight_disk_dir is None:
            raise ConfigError(
                "is needed by the transports disk and lora",
                place="--update-weight-disk-dir",
                remedy="name a folder that trainer and engines see",
            )
        return Path(self.config.update_weight_disk_dir).absolute()

    def _disk(self) -> DiskTransport:
        config = self.config
        local = config.update_weight_local_checkpoint_dir
        if config.update_weight_mode == "delta" and local is None:
            raise ConfigError("is needed by deltas", place="--update-weight-local-checkpoint-dir")
        return DiskTransport(
            self._publisher(self._root()),
            checkpoint=self.checkpoint,
            local=None if local is None else Path(local).absolute(),
            keeps_files=config.update_weight_disk_keep_files,
            after_write=self.after_write,
        )

    def _publisher(self, root: Path) -> Publisher:
        config, stored = self.config, read_layout(self.checkpoint)
        size = config.update_weight_buffer_size
        if config.update_weight_mode == "full":
            return FullPublisher(root, self.checkpoint, stored, shard_size=size)
        return DeltaPublisher(
            root,
            self.checkpoint,
            stored,
            shard_size=size,
            encoding=cast(Encoding, config.update_weight_delta_encoding),
            checksum=config.update_weight_delta_checksum,
        )
