"""Law 6: every wait has a name and a deadline, and a death or an error ends it at once with its cause."""

import os
import signal
import threading
import time

import pytest

from slime.errors import ActorDiedError, DataError, DeadlineError, EngineError, RankLostError
from slime.ray import supervision
from slime.ray.environment import actor_options, ray_session
from slime.ray.supervision import StopFlag, StopRequested, Supervisor


class Worker:
    def sleep(self, seconds):
        time.sleep(seconds)
        return "slept"

    def fail(self):
        raise DataError("broken", place="file:3", remedy="mend it")

    def crash(self):
        raise RuntimeError("boom")

    def watch(self):
        threading.Event().wait()

    def lose_contact(self, seconds):
        time.sleep(seconds)
        raise RankLostError("rank 0 of 2 lost contact with another during train: closed")

    def die(self, seconds=0):
        time.sleep(seconds)
        os._exit(7)

    def miss_weights(self):
        raise EngineError("answered 400: cannot map the weight file", place="http://127.0.0.1:1")


@pytest.fixture(scope="module")
def session():
    with ray_session():
        yield


@pytest.fixture
def worker(session):
    import ray

    actor = ray.remote(Worker).options(**actor_options(threads=3)).remote()
    yield actor
    ray.kill(actor)


def test_a_result_comes_back(worker):
    assert Supervisor(StopFlag()).wait("nap", worker.sleep.remote(0), 60) == "slept"


def test_our_errors_keep_type_place_and_remedy(worker):
    with pytest.raises(DataError, match=r"file:3: broken\n  remedy: mend it"):
        Supervisor(StopFlag()).wait("work", worker.fail.remote(), 60)


def test_other_errors_name_the_actor_and_the_cause(worker):
    with pytest.raises(ActorDiedError, match=r"(?s)^work: failed.*RuntimeError: boom"):
        Supervisor(StopFlag()).wait("work", worker.crash.remote(), 60)


def test_a_deadline_names_what_waited(worker):
    with pytest.raises(DeadlineError, match=r"long nap is not done after 0.5 s"):
        Supervisor(StopFlag(), poll=0.1).wait("long nap", worker.sleep.remote(5), 0.5)


def test_a_look_is_taken_during_every_wait_and_its_error_ends_it(worker):
    supervisor, looks = Supervisor(StopFlag(), poll=0.05), []

    def look():
        looks.append(1)
        if len(looks) == 3:
            raise DataError("seen")

    supervisor.look(look)
    with pytest.raises(DataError, match="seen"):
        supervisor.wait("nap", worker.sleep.remote(30), 60)
    supervisor.unwatch_all()
    assert supervisor.wait("nap", worker.sleep.remote(0.2), 60) == "slept" and len(looks) == 3


def test_a_call_that_fails_by_the_death_of_its_actor_names_the_actor(session):
    import ray

    for _ in range(5):
        other = ray.remote(Worker).options(**actor_options(threads=3)).remote()
        supervisor = Supervisor(StopFlag())
        supervisor.watch("rollout manager", other.watch.remote())
        with pytest.raises(ActorDiedError, match="^rollout manager: its process died"):
            supervisor.wait("rollout step 2", other.die.remote(), 60)


def test_the_death_behind_a_failure_is_found_if_there_is_one(worker, session):
    import ray

    other = ray.remote(Worker).options(**actor_options(threads=3)).remote()
    supervisor = Supervisor(StopFlag())
    supervisor.raise_if_dead(0.1)
    supervisor.watch("engine", other.watch.remote())
    supervisor.raise_if_dead(0.1)
    other.die.remote()
    with pytest.raises(ActorDiedError, match="^engine: its process died"):
        supervisor.raise_if_dead(30)


def test_the_death_of_a_watched_actor_ends_another_wait(worker, session):
    import ray

    other = ray.remote(Worker).options(**actor_options(threads=3)).remote()
    supervisor = Supervisor(StopFlag())
    supervisor.watch("engine", other.watch.remote())
    other.die.remote()
    with pytest.raises(ActorDiedError, match="^engine: its process died"):
        supervisor.wait("nap", worker.sleep.remote(30), 60)


def test_an_engine_that_fails_by_the_death_of_another_is_not_the_cause(worker, session, monkeypatch):
    import ray

    monkeypatch.setattr(supervision, "DEATH_SECONDS", 30.0)
    trainer = ray.remote(Worker).options(**actor_options(threads=3)).remote()
    supervisor = Supervisor(StopFlag())
    supervisor.watch("trainer", trainer.watch.remote())
    ray.get(trainer.sleep.remote(0))
    trainer.die.remote(0.5)
    with pytest.raises(ActorDiedError, match="^trainer: its process died"):
        supervisor.wait("weight update", worker.miss_weights.remote(), 60)


def test_an_actor_that_dies_in_a_call_is_named_and_not_the_call(session):
    import ray

    manager = ray.remote(Worker).options(**actor_options(threads=3)).remote()
    supervisor = Supervisor(StopFlag())
    supervisor.watch("rollout manager", manager.watch.remote())
    with pytest.raises(ActorDiedError, match="^rollout manager: its process died"):
        supervisor.wait("rollout step 9", manager.die.remote(), 60)


def test_an_engine_that_fails_by_itself_is(worker):
    supervisor = Supervisor(StopFlag())
    supervisor.watch("trainer", worker.watch.remote())
    with pytest.raises(EngineError, match="cannot map the weight file"):
        supervisor.wait("weight update", worker.miss_weights.remote(), 60)


@pytest.fixture
def pair(session):
    import ray

    actors = [ray.remote(Worker).options(**actor_options(threads=3)).remote() for _ in range(2)]
    ray.get([actor.sleep.remote(0) for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)


def test_the_results_of_a_group_come_in_its_order(pair):
    calls = {"rank 0": pair[0].sleep.remote(0.5), "rank 1": pair[1].sleep.remote(0)}
    assert Supervisor(StopFlag()).wait_all("nap", calls, 60) == ["slept", "slept"]


def test_of_a_group_the_process_that_failed_of_itself_is_named(pair, monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 30.0)
    calls = {"rank 0": pair[0].lose_contact.remote(0), "rank 1": pair[1].fail.remote()}
    with pytest.raises(DataError, match="broken"):
        Supervisor(StopFlag()).wait_all("training", calls, 60)


def test_of_a_group_the_process_that_died_is_named(pair, monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 30.0)
    calls = {"rank 0": pair[0].lose_contact.remote(0), "rank 1": pair[1].die.remote()}
    with pytest.raises(ActorDiedError, match="^training, rank 1: its process died"):
        Supervisor(StopFlag()).wait_all("training", calls, 60)


def test_of_a_group_the_process_that_others_waited_for_in_vain_is_named(pair, monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.5)
    calls = {"rank 0": pair[0].lose_contact.remote(0), "rank 1": pair[1].sleep.remote(60)}
    with pytest.raises(ActorDiedError, match="^rank 1: did not come to where the others waited"):
        Supervisor(StopFlag()).wait_all("training", calls, 60)


def test_a_requested_stop_gives_up_only_what_can_be_given_up(worker):
    stop = StopFlag()
    stop.requested = True
    assert Supervisor(stop).wait("training", worker.sleep.remote(0.5), 60) == "slept"
    with pytest.raises(StopRequested):
        Supervisor(stop).wait("rollout", worker.sleep.remote(5), 60, can_give_up=True)


def test_the_second_interrupt_leaves_at_once():
    with StopFlag().installed() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
