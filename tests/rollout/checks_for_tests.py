"""Checks that tests run in worker processes."""

import os
import signal
import time

from slime.errors import RewardError
from slime.rollout.rm_hub import Invalid


def add(a, b):
    return a + b


def own_pid():
    return os.getpid()


def hang():
    while True:
        pass


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def crash():
    os.write(2, b"last words")
    os._exit(3)


def fail():
    raise ValueError("no verdict")


def chatter():
    print("this is not an answer", flush=True)
    os.system("echo neither is this")
    return 1


def take_memory():
    return len(bytearray(8 * 1024**3))


def not_json():
    return object()


def parent():
    return os.getppid()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def undecided():
    raise RewardError("cannot tell", reason="odd")


def unanswered():
    return Invalid(-1.0, "no_answer")
