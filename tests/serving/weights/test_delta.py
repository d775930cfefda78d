"""Deltas: what is encoded comes back bit for bit; another base or broken bytes are refused; a crash loses
nothing.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import CheckpointError, ModelError
from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.client import Deadline
from slime.serving.weights.crew import Crew
from slime.serving.weights.delta.apply import pull
from slime.serving.weights.delta.checksum import checksum_of, compressed, decompressed
from slime.serving.weights.delta.encoding import apply, encode
from slime.serving.weights.delta.publisher import DeltaPublisher
from slime.serving.weights.disk import DiskTransport
from slime.serving.weights.full import FullPublisher
from slime.serving.weights.layout import read_layout, read_tensor
from slime.serving.weights.outgoing import WireForm
from slime.serving.weights.transport import Update
from slime.serving.weights.version_folder import read_index, remove_version
from slime.utils.capabilities import capabilities_of
from tests.serving.weights.pool import ModelSource, no_room
from tests.tiny import tiny_model, tiny_model_dir

ENCODINGS = ["xor", "overwrite"]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(0, 200),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_what_is_applied_is_the_new_tensor_bit_for_bit(encoding, dtype, count, share, seed):
    random = np.random.default_rng(seed)
    size = count * dtype.itemsize
    old = random.integers(0, 256, size, dtype=np.uint8)
    new = np.where(random.random(size) < share, random.integers(0, 256, size, dtype=np.uint8), old)
    payload = decompressed(compressed(encode(encoding, old, new, "w")), "w")
    target = old.copy()
    apply(encoding, payload, target, "w")
    assert target.tobytes() == new.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("cut", [0, 1, 5, 11])
def test_payloads_that_do_not_fit_are_refused_before_a_byte_changes(encoding, cut):
    old, new = np.zeros(8, np.uint8), np.arange(8, dtype=np.uint8)
    payload = encode(encoding, old, new, "w").tobytes()
    target = old.copy()
    with pytest.raises(ModelError, match="broken"):
        apply(encoding, payload[: min(cut, len(payload) - 1)], target, "w")
    assert (target == old).all()
    with pytest.raises(ModelError, match="broken"):
        apply(encoding, payload, np.zeros(4, np.uint8), "w")


@pytest.mark.parametrize("name", ["xxh3-128", "blake3", "adler32"])
def test_checksums_tell_bytes_apart(name):
    checksum = checksum_of(name)
    data = np.arange(100, dtype=np.uint8)
    assert checksum(data) == checksum(data.copy()) != checksum(data[::-1].copy())


class Run:
    """A trainer's side of deltas of a tiny model, without engines."""

    def __init__(self, root, arch="llama", **options):
        self.seed = tiny_model_dir(root / "hf", arch=arch, **options)
        self.source = ModelSource(tiny_model(arch, **options))
        self.root, self.local = root / "published", root / "machine" / "local"
        self.stored = read_layout(self.seed)

    def publisher(self, encoding="xor", checksum="xxh3-128"):
        return DeltaPublisher(
            self.root, self.seed, self.stored, shard_size=20_000, encoding=encoding, checksum=checksum
        )

    def full(self):
        return FullPublisher(self.root, self.seed, self.stored, shard_size=20_000)

    def publish(self, publisher, version):
        weights = WireForm(self.stored, None).outgoing(self.source.weights())
        update = Update(version, weights, Crew([], Deadline(9, "test")), "abort")
        return publisher.publish(update), update

    def check(self):
        layout = read_layout(self.local)
        for name, weight in self.source.weights():
            assert read_tensor(self.local, name, layout[name]).equal(weight), name


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_a_chain_of_deltas_leaves_the_trainers_weights(run, encoding, checksum):
    publisher = run.publisher(encoding, checksum)
    for version in (3, 4, 5):
        if version > 3:
            run.source.change(version)
        folder, update = run.publish(publisher, version)
        assert folder.name == f"weight_v{version:06d}"
        pull(folder, run.local, str(version), run.seed)
        run.check()
        density = update.metrics["perf/update_weights_density"]
        assert density == 0 if version == 3 else 0.5 < density <= 1
    index = read_index(folder)
    assert index["base_version"] == "4"
    assert (index["delta_encoding"], index["compression_format"]) == (encoding, "zstd")
    assert index["checksum_format"] == checksum
    others = {path.name for path in run.local.iterdir()}
    assert {"config.json", "tokenizer.json"} <= others
    assert read_layout(run.seed) == run.stored


def test_few_changes_take_few_bytes(run):
    publisher = run.publisher()
    run.publish(publisher, 1)
    with torch.no_grad():
        next(run.source.model.parameters())[0, 0] += 1
    _, update = run.publish(publisher, 2)
    assert 0 < update.metrics["perf/update_weights_density"] < 1e-4
    assert update.metrics["perf/update_weights_wire_bytes"] < 500


def test_a_stored_output_layer_that_is_tied_changes_with_its_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    run = Run(tmp_path, tie_word_embeddings=True)
    tensors = load_file(run.seed / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, run.seed / "model.safetensors", {"format": "pt"})
    run.stored = read_layout(run.seed)
    run.source.change(1)
    folder, _ = run.publish(run.publisher(), 1)
    pull(folder, run.local, "1", run.seed)
    embedding = run.source.model.get_input_embeddings().weight
    assert read_tensor(run.local, "lm_head.weight", read_layout(run.local)["lm_head.weight"]).equal(embedding)


def test_another_base_is_refused_and_the_folder_stays(run):
    publisher = run.publisher()
    first, _ = run.publish(publisher, 1)
    pull(first, run.local, "1", run.seed)
    before = run.local.resolve()
    run.source.change(2)
    run.publish(publisher, 2)
    run.source.change(3)
    third, _ = run.publish(publisher, 3)
    with pytest.raises(ModelError, match="has version 1, and the delta is one to version 2"):
        pull(third, run.local, "3", run.seed)
    with pytest.raises(ModelError, match="holds version 3"):
        pull(third, run.local, "2", run.seed)
    assert run.local.resolve() == before


def test_versions_of_another_run_are_no_base(run, tmp_path):
    first, _ = run.publish(run.publisher(), 1)
    pull(first, run.local, "1", run.seed)
    other = run.publisher()
    run.publish(other, 1)
    run.source.change(2)
    second, _ = run.publish(other, 2)
    with pytest.raises(ModelError, match="has version 1"):
        pull(second, run.local, "2", run.seed)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_corrupted_bytes_are_refused_and_the_folder_stays(run, encoding):
    publisher = run.publisher(encoding)
    first, _ = run.publish(publisher, 1)
    pull(first, run.local, "1", run.seed)
    before = run.local.resolve()
    run.source.change(2)
    second, _ = run.publish(publisher, 2)
    path = sorted(second.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError):
        pull(second, run.local, "2", run.seed)
    assert run.local.resolve() == before
    assert json.loads((run.local / ".slime-version.json").read_text())["version"] == "1"


def test_a_base_that_was_tampered_with_is_noticed(run):
    publisher = run.publisher()
    first, _ = run.publish(publisher, 1)
    pull(first, run.local, "1", run.seed)
    path = run.local / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    run.source.change(2)
    second, _ = run.publish(publisher, 2)
    with pytest.raises(ModelError, match="another base"):
        pull(second, run.local, "2", run.seed)


def test_a_folder_of_the_users_is_not_replaced(run):
    run.local.mkdir(parents=True)
    (run.local / "precious").write_text("x")
    folder, _ = run.publish(run.publisher(), 1)
    with pytest.raises(ModelError, match="something else"):
        pull(folder, run.local, "1", run.seed)
    assert (run.local / "precious").read_text() == "x"


def test_a_folder_that_another_process_holds_is_waited_for_by_a_deadline(run):
    folder, _ = run.publish(run.publisher(), 1)
    run.local.parent.mkdir(parents=True)
    with run.local.with_name(".local.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="held by another process for 0.2 s"):
            pull(folder, run.local, "1", run.seed, patience=0.2)
    pull(folder, run.local, "1", run.seed)
    run.check()


def test_a_trainer_waits_for_the_folder_no_longer_than_its_update_may_take(run):
    cannot_pull = capabilities_of({"version": "0.5.15"}, frozenset(), "engine")
    engine = EngineEndpoint(name="e", url="http://127.0.0.1:1", kind="sglang")

    class Short(Deadline):
        left = 0.2

    crew = Crew([engine], Short(60, "a test"), {"e": cannot_pull})
    weights = WireForm(run.stored, None).outgoing(run.source.weights())
    transport = DiskTransport(run.publisher(), checkpoint=run.seed, local=run.local, keeps_files=True)
    run.local.parent.mkdir(parents=True)
    with run.local.with_name(".local.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"held by another process for 0\.2 s"):
            transport.stage(Update(1, weights, crew, "abort"))


@pytest.mark.parametrize("is_delta", [True, False])
def test_a_disk_that_is_full_is_told_by_its_folder_and_nothing_half_made_stays(run, is_delta):
    publisher = run.publisher()
    first, _ = run.publish(publisher, 1)
    pull(first, run.local, "1", run.seed)
    before = run.local.resolve()
    run.source.change(2)
    second, _ = run.publish(publisher if is_delta else run.full(), 2)
    with no_room(), pytest.raises(CheckpointError, match="cannot take version 2") as caught:
        pull(second, run.local, "2", run.seed)
    assert caught.value.place == str(run.local)
    assert run.local.resolve() == before
    assert [*run.local.parent.glob(".local.at-*")] == [before]
    pull(second, run.local, "2", run.seed)
    run.check()


def test_a_version_that_cannot_be_removed_is_told(tmp_path, caplog):
    remove_version(tmp_path / "gone")
    assert "cannot be removed" in caplog.text


PULLS = """
import sys
from pathlib import Path
from slime.serving.weights.delta.apply import pull
print("ready", flush=True)
for source, version in zip(sys.argv[3::2], sys.argv[4::2]):
    pull(Path(source), Path(sys.argv[1]), version, Path(sys.argv[2]))
"""


def test_a_kill_at_any_moment_leaves_a_whole_version(run):
    publisher = run.publisher()
    wanted, states, words = [], {}, []
    for version in range(1, 7):
        run.source.change(version)
        folder, _ = run.publish(publisher, version)
        states[str(version)] = {name: weight.clone() for name, weight in run.source.weights()}
        wanted.append(folder)
        words += [str(folder), str(version)]
    pull(wanted[0], run.local, "1", run.seed)
    for delay in (0.0, 0.004, 0.01, 0.03):
        child = subprocess.Popen(
            [sys.executable, "-c", PULLS, str(run.local), str(run.seed), *words[2:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        child.stdout.readline()
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        version = json.loads((run.local / ".slime-version.json").read_text())["version"]
        layout = read_layout(run.local)
        for name, weight in states[version].items():
            assert read_tensor(run.local, name, layout[name]).equal(weight), (version, name)
