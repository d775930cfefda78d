"""Steps of every policy on a scripted engine, with weight updates between them, and the books of all prompts.

Used by the fault table, the soak and the tests of partial rollouts. What `slime.ray` does between the steps
of a real run is done here in one process.
"""

import asyncio
import contextlib

from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.inflight import IN_FLIGHT
from slime.rollout.loop import run_blocking
from slime.rollout.session import SESSION
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.engine_client import EngineClient
from tests.rollout.kit import engine_args, state_for

POLICIES = {
    "synchronous": {"over_sampling_batch_size": 4},
    "partial": {"over_sampling_batch_size": 4, "partial_rollout": True},
    "ahead": {"max_staleness": 1},
    "fully": {"max_staleness": 2},
    "waits": {"max_staleness": 2, "update_in_flight": "wait"},
}
BOUND = {"synchronous": None, "partial": None, "ahead": 1, "fully": 2, "waits": 2}
SEEN = []
"""Group indices that the hook of all samples saw, one list a step."""


def note_seen(args, groups, data_source):
    SEEN.append([_first(group).group_index for group in groups])


class Steps:
    """A run in one process: `run` makes steps, `books` tells where every prompt is."""

    def __init__(self, server, source, policy, **values):
        SEEN.clear()
        self.server, self.source, self.policy = server, source, policy
        flags = {
            "n_samples_per_prompt": source.size,
            "rollout_all_samples_process_path": "tests.rollout.policies.note_seen",
            "max_failed_rollout_ratio": 1.0,
        }
        self.args = engine_args(server.url, **(flags | POLICIES[policy] | values))
        self.ledger = state_for(self.args).ledger
        self.outputs = []
        self.version = -1

    def run(self, count):
        """So many further steps; the weights change as the policy has it."""
        generate = generate_rollout_fully_async if self.policy in ("fully", "waits") else generate_rollout
        for step in range(len(self.outputs), len(self.outputs) + count):
            self.update(max(step - 1, 0) if self.policy == "ahead" else step)
            self.outputs.append(generate(self.args, step, self.source))
        return self.outputs[-count:]

    def update(self, version):
        """What `slime.ray.actors.Actors.synchronise` does, without weights."""
        if version == self.version:
            return
        run_blocking(SESSION.before_update())
        self.server.engine.set_weight_version(str(version))
        run_blocking(SESSION.weights_changed(version))
        self.version = version

    def state_backoff(self, seconds):
        """Wait longer between the tries of an engine call."""
        GenerateState(self.args).__dict__["engine"] = EngineClient(self.server.url, backoff=seconds)

    def trained(self):
        """Indices of the groups that left for training."""
        return [_first(group).group_index for output in self.outputs for group in output.samples]

    def rollouts(self):
        """All samples that left for training."""
        return [
            sample
            for output in self.outputs
            for group in output.samples
            for member in group
            for sample in (member if isinstance(member, list) else [member])
        ]

    def check_books(self):
        """Law 5: every prompt that was taken is in one batch, was dropped in one, or is back."""
        self.close()
        self.ledger.check(0)
        trained, back = self.trained(), [_first(group).group_index for group in self.source.returned]
        judged = [group for groups in SEEN for group in groups]
        assert len(set(trained)) == len(trained)
        assert set(trained) <= set(judged)
        assert sorted(judged + back) == list(range(self.source.given))

    def close(self):
        """End what is in flight."""
        run_blocking(SESSION.close())
        assert IN_FLIGHT.describe() == "nothing is in flight"
        assert run_blocking(_number_of_tasks()) == 1


@contextlib.contextmanager
def steps(server, source, policy, **values):
    """`Steps` whose session ends with the body."""
    try:
        yield Steps(server, source, policy, **values)
    finally:
        forget()


def forget():
    """Leave nothing behind for the next test of the process."""
    run_blocking(SESSION.close())
    SESSION.version = None
    GenerateState.clear_instance()


async def _number_of_tasks():
    for _ in range(2000):
        if len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0.01)
    return len(asyncio.all_tasks())


def _first(group):
    return group[0][0] if isinstance(group[0], list) else group[0]
