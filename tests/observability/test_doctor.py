"""A run can be asked what it is doing, whatever it is stuck in."""

import os
import signal
import subprocess
import sys
import time

import pytest

from slime.errors import DataError
from slime.observability.doctor import FOLDER, Patient, answering_signal, environment_of, examine
from slime.rollout.inflight import InFlight
from slime.utils.request_scope import RequestScope

CHILD = """
import sys, time
from slime.observability.doctor import patient_of_environment
patient = patient_of_environment(lambda: "at work")
print("ready", flush=True)
{body}
"""


def child(run, body):
    """Another process of the run, that does `body` once it can be asked."""
    env = os.environ | environment_of(run, "worker")
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(body=body)], env=env, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def test_every_process_tells_what_is_in_flight_with_rollout_and_engine_call(tmp_path):
    inflight, scope = InFlight(), RequestScope()

    async def abort(rid):
        raise AssertionError

    patient = Patient(tmp_path / FOLDER, "rollout manager", inflight.describe)
    with (
        inflight.track("rollout 7 (group 1)", "generate in mine", 60.0, scope=scope),
        scope.holding("7-abc", abort, 12),
    ):
        found = examine(tmp_path)
    patient.close()
    assert "== rollout manager" in found
    assert "rollout 7 (group 1): generate in mine for" in found and "deadline in" in found
    assert "engine call 7-abc for" in found and "12 prompt tokens" in found
    assert examine(tmp_path) == "the run has ended"


@pytest.mark.parametrize("body", ["time.sleep(60)", "while True: pass"])
def test_a_process_that_blocks_answers_with_the_line_that_it_is_at(tmp_path, body):
    process = child(tmp_path, body)
    try:
        found = examine(tmp_path)
    finally:
        process.kill()
        process.wait()
    assert "at work" in found and "in <module>" in found


def test_a_stopped_process_is_told_from_one_that_is_gone(tmp_path):
    process = child(tmp_path, "time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    try:
        assert "does not answer" in examine(tmp_path, seconds=1.0)
    finally:
        process.kill()
        process.wait()
    assert "is gone" in examine(tmp_path)


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no run"):
        examine(tmp_path)


def test_a_signal_prints_it_while_the_work_goes_on(tmp_path, capfd):
    patient = Patient(tmp_path / FOLDER, "driver", lambda: "waiting for step 3")
    with answering_signal(tmp_path):
        os.kill(os.getpid(), signal.SIGUSR1)
        end, printed = time.monotonic() + 10, ""
        while "waiting for step 3" not in printed and time.monotonic() < end:
            time.sleep(0.05)
            printed += capfd.readouterr().err
    patient.close()
    assert "== driver" in printed and "waiting for step 3" in printed
