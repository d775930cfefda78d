"""The loop tells what its metrics say of wrong learning."""

import dataclasses

import pytest

from slime.backends.update import RolloutUpdate
from slime.config import load_config
from slime.errors import ActorDiedError, CheckpointError, DataError
from slime.ray.batch import RolloutBatch
from slime.ray.driver import Driver
from slime.ray.lineage import Trained
from slime.ray.supervision import StopRequested


class OneStep:
    """Actors of a run whose steps all have the same gap between engine and trainer."""

    generates = trains = True
    evaluates_aside = False

    def __init__(self, gap):
        self.gap = gap

    def generate(self, step, on_progress):
        return RolloutBatch([])

    def train(self, step, samples):
        return RolloutUpdate(steps=[{"train_rollout_logprob_abs_diff": self.gap}], rollout={})

    def synchronise(self, version):
        return {}

    def raise_if_stopped(self):
        pass


class Console:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def phase(self, name, total=None):
        pass

    def progress(self, done):
        pass

    def step(self, step, metrics):
        pass


class Log:
    def log(self, metrics, step):
        pass


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = {"--hf-checkpoint": tmp_path, "--rollout-batch-size": 2, "--num-rollout": 2}
    words |= {"--rollout-max-response-len": 4, "--n-samples-per-prompt": 2, "--rm-type": "math"}
    argv = [str(part) for pair in words.items() for part in pair]
    return load_config([*argv, "--disable-rollout-global-dataset"])


@pytest.mark.parametrize(
    ("gap", "bound", "warned"), [(0.2, 0.1, True), (0.05, 0.1, False), (0.05, 0.01, True)]
)
def test_a_gap_between_engine_and_trainer_above_the_bound_is_told_in_every_step(
    config, tmp_path, gap, bound, warned
):
    run = dataclasses.replace(config.run, logprob_gap_warning=bound)
    config, console = dataclasses.replace(config, run=run), Console()
    driver = Driver(config, config.plan(None), OneStep(gap), console, Log(), tmp_path, Trained())
    assert driver.run().steps_done == 2
    assert len(console.notes) == 2 * warned
    assert all(f"{gap:.2g} on average" in note and "--use-tis" in note for note in console.notes)


class StoppedWhileGenerating(OneStep):
    """A run that is asked to stop while the batch after the one that trains is made."""

    def __init__(self):
        super().__init__(0.0)
        self.trained, self.versions = [], []

    def begin_generate(self, step):
        return step

    def generated(self, step, call, on_progress):
        if step == 2:
            raise StopRequested("rollout step 2")
        return RolloutBatch([])

    def train(self, step, samples):
        self.trained.append(step)
        return super().train(step, samples)

    def synchronise(self, version):
        self.versions.append(version)
        return {}

    def raise_if_stopped(self):
        if 1 in self.trained:
            raise StopRequested("between steps")


def test_a_stop_behind_a_step_that_has_trained_counts_the_step(config, tmp_path):
    rollout = dataclasses.replace(config.rollout, async_training=True)
    data = dataclasses.replace(config.data, num_rollout=5)
    config, actors, logged = (
        dataclasses.replace(config, rollout=rollout, data=data),
        StoppedWhileGenerating(),
        [],
    )
    log = Log()
    log.log = lambda metrics, step: logged.append(step)
    result = Driver(config, config.plan(None), actors, Console(), log, tmp_path, Trained()).run()
    assert actors.trained == [0, 1] and actors.versions == [1]
    assert result.steps_done == 2 and result.stopped and logged == [0, 1]


class FailsAhead(StoppedWhileGenerating):
    """A run whose third batch cannot be made, and whose disk or trainer may be gone then too."""

    def __init__(self, unsaved=None):
        super().__init__()
        self.saved, self.unsaved = [], unsaved

    def generated(self, step, call, on_progress):
        if step == 2:
            raise DataError("the data source has no more prompts")
        return RolloutBatch([])

    def raise_if_stopped(self):
        pass

    def save_data_position(self, step):
        if step == 1 and self.unsaved:
            raise self.unsaved
        return []

    def save(self, folder):
        self.saved.append(folder.name)
        return []


@pytest.mark.parametrize("unsaved", [None, ActorDiedError("its process died"), CheckpointError("disk full")])
def test_a_step_that_has_trained_is_logged_and_saved_before_the_next_batch_fails_the_run(
    config, tmp_path, unsaved
):
    rollout = dataclasses.replace(config.rollout, async_training=True)
    data = dataclasses.replace(config.data, num_rollout=5)
    model = dataclasses.replace(config.model, save=str(tmp_path / "save"), save_interval=1)
    config = dataclasses.replace(config, rollout=rollout, data=data, model=model)
    actors, console, logged, log = FailsAhead(unsaved), Console(), [], Log()
    log.log = lambda metrics, step: logged.append(step)
    driver = Driver(config, config.plan(None), actors, console, log, tmp_path, Trained())
    with pytest.raises(DataError, match="no more prompts"):
        driver.run()
    assert actors.trained == logged == [0, 1] and actors.versions == [1]
    assert driver.result.steps_done == 2
    assert len(actors.saved) == (1 if unsaved else 2)
    assert [note for note in console.notes if "step 1 not saved" in note and unsaved.message in note] == (
        console.notes
    )


class StoppedWhileUpdating(OneStep):
    """A run that is asked to stop while an update replaces an engine."""

    is_stopped = False

    def synchronise(self, version):
        self.is_stopped = True
        raise StopRequested("start of the engines")

    def raise_if_stopped(self):
        if self.is_stopped:
            raise StopRequested("between steps")


def test_a_stop_in_an_update_counts_the_step_that_has_trained(config, tmp_path):
    logged, log = [], Log()
    log.log = lambda metrics, step: logged.append(step)
    actors = StoppedWhileUpdating(0.0)
    result = Driver(config, config.plan(None), actors, Console(), log, tmp_path, Trained()).run()
    assert result.steps_done == 1 and result.stopped and logged == [0]


class Versions(OneStep):
    """Notes the versions that engines get."""

    def __init__(self):
        super().__init__(0.0)
        self.calls = []

    def begin_generate(self, step):
        return step

    def generated(self, step, call, on_progress):
        return RolloutBatch([])

    def synchronise(self, version):
        self.calls.append(f"update {version}")
        return {}

    def evaluate(self, step):
        self.calls.append(f"evaluation {step}")
        return {}


def test_weights_travel_at_the_interval_and_before_each_evaluation(config, tmp_path):
    config = dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, async_training=True),
        data=dataclasses.replace(config.data, num_rollout=5),
        weights=dataclasses.replace(config.weights, update_weights_interval=3),
        evaluation=dataclasses.replace(config.evaluation, eval_config="e.yaml", eval_interval=2),
    )
    actors, log, versions = Versions(), Log(), []
    log.log = lambda metrics, step: versions.append(metrics.get("rollout/policy_version"))
    Driver(config, config.plan(None), actors, Console(), log, tmp_path, Trained()).run()
    assert actors.calls == [
        "evaluation 0",
        "update 2",
        "evaluation 2",
        "update 3",
        "update 4",
        "evaluation 4",
        "update 5",
        "evaluation 5",
    ]
    assert [version for version in versions if version is not None] == [0, 0, 2, 3, 4]
