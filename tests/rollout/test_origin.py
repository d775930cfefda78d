"""A group that begins again is the group that the data source gave, whatever its hook did to it."""

import asyncio
import json

import numpy as np
import pytest

from slime.rollout.accounting import Fate
from slime.rollout.group_run import GroupRun, copy_of
from slime.rollout.inflight import InFlight
from slime.rollout.origin import KEY, origin_of, with_origin, without_origin
from slime.rollout.outcome import Completed, Rollout
from slime.rollout.policy import Synchronous
from slime.rollout.sample_json import group_from_json, group_to_json
from slime.rollout.scheduler import Scheduler
from slime.rollout.scheduling import Limits
from slime.utils.types import Sample
from tests.rollout.kit import ListSource, finished


def prepare(sample):
    """A sample with all that a data source may give."""
    sample.label, sample.metadata = "42", {"tools": ["a"], "table": np.arange(3)}
    sample.train_metadata, sample.apply_chat_template_kwargs = {"weight": 2.0}, {"enable_thinking": False}
    sample.tokens, sample.difficulty = [1, 2], "hard"


class Agent:
    """A hook that works on the sample that it gets, and on its metadata; its turns fan out or not."""

    def __init__(self, fans_out):
        self.fans_out, self.version, self.seen = fans_out, "0", []

    async def __call__(self, group, step, stop):
        await asyncio.sleep(0)
        self.seen.append(json.dumps(group_to_json(group)))
        return [self.run(member) for member in group]

    def run(self, sample):
        if isinstance(sample, list) or sample.status is Sample.Status.COMPLETED:
            return self.rollout(sample if isinstance(sample, list) else [sample], isinstance(sample, list))
        final = finished(sample, weight_versions=[self.version], prompt="rewritten", difficulty="easy")
        final.metadata["turns"], final.train_metadata["weight"] = 5, 0.0
        final.metadata["tools"].append("b")
        if not self.fans_out:
            return self.rollout([final], False)
        aside = finished(copy_of(sample), weight_versions=[self.version], prompt="summarise the file")
        return self.rollout([aside, final], True)

    def rollout(self, samples, fan_out):
        first = samples[0]
        return Rollout(
            group_index=first.group_index,
            rollout_id=first.rollout_id,
            samples=tuple(samples),
            fan_out=fan_out,
            outcome=Completed(),
        )


def steps(source, agent, version, *, over):
    """A batch of one group at this version; no token may be older than one update."""

    async def main():
        limits = Limits(wanted=1, group_size=2, max_staleness=1)
        policy = Synchronous(over)
        async with Scheduler(
            source=source, run_group=agent, policy=policy, limits=limits, inflight=InFlight()
        ) as one:
            one.weights_changed(version)
            batch = await one.collect(version)
            return batch, one.ledger

    return asyncio.run(main())


@pytest.mark.parametrize("fans_out", [False, True])
def test_a_group_whose_tokens_are_too_old_as_it_ends_begins_again_as_it_was_given(fans_out):
    source, agent = ListSource(prepare=prepare), Agent(fans_out)

    async def ages(*call):
        rollouts = await Agent.__call__(agent, *call)
        agent.version = "5"
        return rollouts

    batch, ledger = steps(source, ages, 5, over=1)
    assert [run.key[0] for run in batch.groups] == [0] and len(agent.seen) == 2
    assert agent.seen[1] == agent.seen[0]
    assert ledger.total.reasons(Fate.REQUEUED) == {"begins again": 2}


@pytest.mark.parametrize("fans_out", [False, True])
def test_a_group_that_is_too_old_in_the_buffer_of_a_checkpoint_begins_again_as_it_was_given(fans_out):
    source, agent = ListSource(prepare=prepare), Agent(fans_out)
    batch, _ = steps(source, agent, 0, over=2)
    (group,) = source.returned
    given = agent.seen[1]
    assert {s.status.value for member in group for s in leaves(member)} == {"completed"}
    source.returned = [group_from_json(json.loads(json.dumps(group_to_json(group))))]
    agent.version, agent.seen = "5", []
    again, _ = steps(source, agent, 5, over=1)
    assert agent.seen == [given]
    members = [*batch.groups[0].members, *again.groups[0].members]
    assert not any(KEY in s.__dict__ for member in members for s in leaves(member))


def leaves(member):
    return member if isinstance(member, list) else [member]


def test_a_rollout_that_goes_back_twice_keeps_how_it_began():
    given = Sample(group_index=0, index=0, rollout_id=0, prompt="p", metadata={"turns": 0})
    prepare(given)
    first = with_origin(finished(copy_of(given), metadata={"turns": 1}), given)
    run = GroupRun(fresh=[copy_of(first)], tickets=[0])
    running = without_origin(first)
    running.metadata["turns"] = 2
    run.rollouts = [Agent(False).rollout([running], False)]
    (back,) = group_from_json(group_to_json(run.resumable()))
    assert back.metadata == {"turns": 2} and KEY not in running.__dict__
    assert json.dumps(group_to_json([origin_of(back)])) == json.dumps(group_to_json([given]))
    assert [s.tokens for s in run.from_the_start()] == [[1, 2]]


def test_without_a_record_the_first_row_tells_and_the_log_says_so(caplog):
    old = finished(Sample(group_index=0, index=0, rollout_id=7, prompt="p", metadata={"cut": True, "row": 3}))
    again = origin_of(old)
    assert (again.prompt, again.tokens, again.metadata) == ("p", [7], {"row": 3})
    assert "rollout 7 has no record of how it began" in caplog.text
