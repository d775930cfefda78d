"""Ways of weights into an engine: seconds and pause, against the rate at which this machine copies memory.

    python benchmarks/weights.py [--model 135m|1b] [--engine embedded|sglang --sglang-python P] [--out F]

A model with random weights in bfloat16 lies in shared memory, as a trainer's on CPU does, and its folder in
/dev/shm; the engine serves it in another process, and gets a new version by each way a few times, at rest,
on one thread. Before each update a copy is timed: as many bytes as the model has (512 MiB at most), between
two blocks of this process that were written before, on one thread. The first update of a way, which makes
its memory and its group, is told apart from the later ones, of which medians count. Deltas change 1 % and 10
% of the elements, drawn at random.
"""

import argparse
import json
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slime.config.sections import EngineConfig
from slime.config.serving_sections import WeightsConfig
from slime.contracts.tokenizer import write_byte_tokenizer
from slime.serving.embedded.process import EngineProcess
from slime.serving.endpoint import EngineEndpoint
from slime.serving.sglang.command import EngineLaunch
from slime.serving.sglang.process import SGLangProcess
from slime.serving.weights.factory import make_weight_sync
from slime.serving.weights.shared import SharedWeights

SHAPES = {
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
AIM = 0.4
"""Share of the copy rate that tensor and disk should reach."""
REPEATS = 3
WAYS = "tensor,nccl,disk,delta xor 1,delta xor 10,delta overwrite 1,delta overwrite 10"
HEAD = (
    f"{'way':22} {'first s':>8} {'s':>8} {'pause s':>8} {'GB/s':>6} {'copy':>6} {'of copy':>8} "
    f"{'in pause':>8} {'wire MB':>8}"
)


class Model:
    """Weights by name, as a trainer has them."""

    def __init__(self, shape: dict[str, int], folder: Path, arch: str) -> None:
        """Write the folder that engines serve."""
        config = AutoConfig.for_model(
            arch,
            **shape,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
        )
        config.architectures = ["Qwen3ForCausalLM" if arch == "qwen3" else "LlamaForCausalLM"]
        config.dtype = torch.bfloat16
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(0)
        self.shared = SharedWeights.reserve(model.to(torch.bfloat16).named_parameters())
        self.shared.hide()
        self.tensors = self.shared.views
        for tensor in self.tensors.values():
            tensor.uniform_(-0.03, 0.03, generator=generator)
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        folder.mkdir(parents=True)
        config.save_pretrained(folder)
        write_byte_tokenizer(folder)
        save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
        self.folder = folder

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As of a `WeightSource`."""
        yield from self.tensors.items()

    def present(self) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()

    def change(self, share: float) -> None:
        """Give a share of the elements other values."""
        for tensor in self.tensors.values():
            flat = tensor.view(-1)
            chosen = torch.randint(len(flat), (max(1, int(share * len(flat))),))
            flat[chosen] *= 1.03


@dataclass
class Row:
    """What a way took.

    Attributes:
        first, seconds, pause: seconds of the first and of later updates, and of their pauses.
        rate, copy: 1e9 bytes a second of updates and of copies.
        wire: 1e6 bytes that travelled.
    """

    way: str
    first: float
    seconds: float
    pause: float
    rate: float
    copy: float
    wire: float

    @property
    def share(self) -> float:
        """Of the copy rate."""
        return self.rate / self.copy

    def line(self) -> str:
        """A line of the table."""
        pause = self.share * self.seconds / self.pause
        return (
            f"{self.way:22} {self.first:8.2f} {self.seconds:8.2f} {self.pause:8.2f} {self.rate:6.2f} "
            f"{self.copy:6.2f} {self.share:8.0%} {pause:8.0%} {self.wire:8.1f}"
        )


class Copies:
    """Plain copies on one thread."""

    def __init__(self, size: int) -> None:
        self._source, self._target = (torch.full((size,), value, dtype=torch.uint8) for value in (1, 2))

    def rate(self) -> float:
        """Bytes a second of one."""
        started = time.perf_counter()
        self._target.copy_(self._source)
        return len(self._source) / (time.perf_counter() - started)


def measure(
    way: str, model: Model, endpoint: EngineEndpoint, root: Path, copies: Copies, version: int
) -> Row:
    """Some updates by one way."""
    name, _, detail = way.partition(" ")
    flags: dict[str, str] = {"update_weight_transport": name}
    if name == "delta":
        encoding, percent = detail.split()[:2]
        flags = {"update_weight_mode": "delta", "update_weight_delta_encoding": encoding}
        flags["update_weight_local_checkpoint_dir"] = str(root / "local")
    if name in ("disk", "delta"):
        flags["update_weight_disk_dir"] = str(root / "published")
    share = float(percent) / 100 if name == "delta" else 0.0
    sync = make_weight_sync(
        WeightsConfig(**flags),
        source=model,
        engine_kind=endpoint.kind,
        hf_checkpoint=str(model.folder),
        timeout=600.0,
        one_machine=True,
        shared=model.shared,
    )
    sync.connect([endpoint])
    reports, rates = [], []
    for number in range(1 + REPEATS):
        if share:
            model.change(share)
        rates.append(copies.rate())
        report = sync.update(version + number, "abort")
        if report.failed:
            raise SystemExit(f"{way}: {dict(report.failed)}")
        reports.append(report.metrics)
    sync.close()
    first, later = reports[0], reports[1:]
    middle = {key: statistics.median(metrics[key] for metrics in later) for key in later[0]}
    seconds = middle["perf/update_weights_time"]
    copy = statistics.median(rates[1:])
    return Row(
        way,
        first["perf/update_weights_time"],
        seconds,
        middle["perf/update_weights_pause_time"],
        model.bytes / seconds / 1e9,
        copy / 1e9,
        middle.get("perf/update_weights_wire_bytes", float(model.bytes)) / 1e6,
    )


def start(kind: str, model: Model, root: Path, python: str | None) -> EngineProcess | SGLangProcess:
    """The engine, on one thread."""
    if kind == "embedded":
        config = EngineConfig(dtype="bfloat16", max_total_tokens=256, context_length=128, num_threads=1)
        return EngineProcess(str(model.folder), config, root / "engine.log", 600.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {"max_total_tokens": 256, "max_running_requests": 2, "mem_fraction_static": 0.5}
    launch = EngineLaunch(model_path=str(model.folder), host="127.0.0.1", port=port, seed=1, flags=flags)
    return SGLangProcess(launch, root / "engine.log", python=python)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES], default="135m")
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--sglang-python")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    root = Path(tempfile.mkdtemp(prefix="slime-bench-", dir="/dev/shm"))
    try:
        arch = "qwen3" if options.engine == "sglang" else "llama"
        model = Model(SHAPES[options.model], root / "model", arch)
        engine = start(options.engine, model, root, options.sglang_python)
        try:
            endpoint = EngineEndpoint(name="engine", url=engine.url, kind=options.engine)
            copies = Copies(min(model.bytes, 512 << 20))
            print(f"{options.model}, {options.engine}: {model.bytes / 1e6:.0f} MB\n{HEAD}", flush=True)
            rows = []
            for number, way in enumerate(options.ways.split(","), start=1):
                rows.append(measure(way, model, endpoint, root, copies, 100 * number))
                print(rows[-1].line(), flush=True)
        finally:
            engine.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for row in rows:
        if row.way in ("tensor", "disk") and row.share < AIM:
            print(f"{row.way} misses its aim of {AIM:.0%} of the copy rate: {row.share:.0%}")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
