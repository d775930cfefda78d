"""A local Ray session ends with its driver, however that ends."""

import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.leftovers import nothing_left

DRIVER = """
import os, ray, signal, sys
from slime.ray.environment import ray_session
with ray_session():
    ray.get(ray.remote(lambda: 1).remote())
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("ends", 0)])
def test_nothing_of_a_session_is_left_when_its_driver(how, code):
    with nothing_left(60.0) as left:
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, how], env=dict(os.environ))
        left.own(driver)
        assert driver.wait(timeout=120) == code
