"""All training runs on one thread, so that one pool of OpenMP threads has the cores."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from slime.backends.torch.ranks import ALONE
from slime.ray.train_actor import TrainActor, on_one_thread


class Worker:
    ranks = ALONE

    def __init__(self):
        self.compute = ThreadPoolExecutor(max_workers=1)

    @on_one_thread
    def thread(self, *, fails=False):
        if fails:
            raise ValueError("inside")
        return threading.get_ident()


def test_calls_from_many_threads_compute_on_one_of_their_own():
    worker = Worker()
    with ThreadPoolExecutor(max_workers=8) as callers:
        threads = {call.result() for call in [callers.submit(worker.thread) for _ in range(40)]}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_errors_reach_the_caller():
    with pytest.raises(ValueError, match="inside"):
        Worker().thread(fails=True)


@pytest.mark.parametrize("name", ["start", "train", "log_probs", "save", "save_hf", "load"])
def test_every_call_that_computes_does_so_there(name):
    method = getattr(TrainActor, name)
    assert method.__code__ is on_one_thread(method).__code__


def test_the_probe_of_a_trainer_that_sleeps_wakes_nothing_but_what_the_update_lends():
    asleep = SimpleNamespace(
        log_probs=lambda samples: [[-1.0] * sample.response_length for sample in samples]
    )
    assert TrainActor._score(SimpleNamespace(_trainer=asleep), [5, 6, 7]) == [-1.0, -1.0]
