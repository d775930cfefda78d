"""Kills in the middle: nothing is left in shared memory, and an engine's death costs the others only time."""

import base64
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from slime.config.sections import EngineConfig
from slime.config.serving_sections import WeightsConfig
from slime.serving.embedded.process import EngineProcess
from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.bucket_buffer import BucketBuffer, ShmNames
from slime.serving.weights.factory import make_weight_sync
from tests.serving.weights.bucket import BUCKET
from tests.serving.weights.pool import StrikingSource, expected, scores
from tests.tiny import tiny_model, tiny_model_dir

SHM = Path("/dev/shm")
WRITER = """
import time
from slime.serving.weights.bucket_buffer import BucketBuffer, ShmNames
from tests.serving.weights.bucket import BUCKET
names = ShmNames()
messages = BucketBuffer(names).fill(BUCKET, 2)
print(names.prefix, *messages, flush=True)
time.sleep(600)
"""
READER = """
import base64, pickle, sys
from tests.serving.weights.bucket import read
for line in sys.stdin:
    print(read(line), flush=True)
"""


WANTED = [
    ("a", "torch.bfloat16", (100,), 4950.0),
    ("b", "torch.float32", (3, 5), 15.0),
    ("c", "torch.int64", (), 7.0),
]


def child(program, **options):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        **options,
    )


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_bucket_is_read_by_another_process_and_nothing_is_left_of_either():
    names = ShmNames()
    buffer = BucketBuffer(names)
    reader = child(READER)
    for _ in range(2):  # the memory is used again
        for message in buffer.fill(BUCKET, 2):
            reader.stdin.write(message + "\n")
            reader.stdin.flush()
            assert reader.stdout.readline().strip() == str(WANTED)
    managers = [p for p in psutil.Process(reader.pid).children() if "shm_manager" in p.name()]
    assert not [p for p in psutil.Process().children() if "shm_manager" in p.name()]
    reader.kill()
    reader.wait()
    buffer.close()
    names.close()
    assert [*SHM.glob(names.prefix + "*")] == []
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in managers))


def test_a_killed_trainer_leaves_no_shared_memory_and_no_process():
    writer = child(WRITER)
    prefix, *messages = writer.stdout.readline().split()
    assert len(messages) == 2 and len([*SHM.glob(prefix + "*")]) == 3
    helpers = psutil.Process(writer.pid).children(recursive=True)
    writer.kill()
    writer.wait()
    wait_until(lambda: not [*SHM.glob(prefix + "*")])
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in helpers))


def test_a_message_holds_only_calls_that_sglangs_unpickler_allows():
    names = ShmNames()
    buffer = BucketBuffer(names)
    data = base64.b64decode(buffer.fill(BUCKET, 1)[0])
    buffer.close()
    names.close()
    found = set()

    class Made:
        def __init__(self, *_):
            self.made = True

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            found.add(f"{module}.{name}")
            return Made

    Unpickler(io.BytesIO(data)).load()
    reductions = "torch.multiprocessing.reductions."
    calls = ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename")
    plain = {
        "types.SimpleNamespace",
        "torch.Size",
        "torch.storage.UntypedStorage",
        "torch.UntypedStorage",
        "torch.uint8",
        "torch.Tensor",
    }
    dtypes = {"torch.bfloat16", "torch.float32", "torch.int64"}
    assert found <= {reductions + call for call in calls} | plain | dtypes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def processes(folder, tmp_path):
    config = EngineConfig(max_total_tokens=512, context_length=128, num_threads=1)

    def start(number):
        return EngineProcess(str(folder), config, tmp_path / f"{number}.log")

    with ThreadPoolExecutor() as pool:
        started = [*pool.map(start, range(3))]
    yield started
    for process in started:
        process.stop()


@pytest.mark.slow
def test_engines_that_hang_or_die_in_the_middle_do_not_hold_up_the_other(folder, processes):
    source = StrikingSource(tiny_model(seed=3))
    config = WeightsConfig(update_weight_transport="nccl", update_weight_buffer_size=20_000)
    sync = make_weight_sync(
        config,
        source=source,
        engine_kind="embedded",
        hf_checkpoint=str(folder),
        timeout=20.0,
        one_machine=True,
    )
    endpoints = [
        EngineEndpoint(name=f"engine-{i}", url=p.url, kind="embedded") for i, p in enumerate(processes)
    ]
    for number, by in enumerate((signal.SIGSTOP, signal.SIGKILL)):
        source.strike = lambda: None
        sync.connect([endpoints[number], endpoints[2]])
        assert sync.update(2 * number + 1, "abort").failed == {}
        source.change(number)
        pid = processes[number].pid
        source.strike = lambda pid=pid, by=by: os.kill(pid, by)
        started = time.monotonic()
        report = sync.update(2 * number + 2, "abort")
        assert time.monotonic() - started < 20.0
        assert list(report.failed) == [f"engine-{number}"], report.failed
        found, named = scores(processes[2].url)
        assert named == str(2 * number + 2)
        assert found == pytest.approx(expected(source.model), abs=1e-4)
        if by == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    sync.close()
