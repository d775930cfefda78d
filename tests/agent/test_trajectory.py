"""Properties of `TrajectoryManager`: what is trained, where, and once."""

import base64
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.utils.types import Sample, SpecInfo

SID = "s"


def user(text):
    return {"role": "user", "content": text}


def assistant(text, handle=None):
    return {"role": "assistant", "content": text} | ({"handles": [handle]} if handle else {})


def system(text):
    return {"role": "system", "content": text}


class Session:
    """Records turns whose sampled tokens are all different."""

    def __init__(self, **options):
        self.manager = TrajectoryManager(**options)
        self.ids = itertools.count(1000)
        self.sampled = {}

    def turn(self, history, prompt, reply, *, size=3, handle=None, **fields):
        output = [next(self.ids) for _ in range(size)]
        record = TurnRecord(
            prompt, output, fields.pop("finish_reason", "stop"), [-float(token) for token in output], **fields
        )
        record.handles = [handle] if handle else []
        self.manager.record_turn(SID, turn=record, prompt_messages=history, response_message=assistant(reply))
        return [*prompt, *output]

    def samples(self, **options):
        base = Sample(index=7, group_index=3, prompt="p", label="l", metadata={"a": 1})
        return self.manager.get_trajectory(SID, base_sample=base, reward=1.5, **options)


def trained(samples):
    """The trained tokens of all samples; checks the lists and log-probs of each."""
    found = []
    for sample in samples:
        sample.validate_lengths()
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        for token, mask, log_prob in zip(response, sample.loss_mask, sample.rollout_log_probs, strict=True):
            assert log_prob == (-float(token) if mask else 0.0)
            if mask:
                found.append(token)
    return found


def tally(samples):
    return samples[0].metadata["trajectory"]


def test_a_growing_conversation_is_one_sample():
    session = Session()
    history, tokens = [user("q")], [1, 2]
    for turn in range(3):
        tokens = session.turn(history, tokens, f"a{turn}")
        history = [*history, assistant(f"a{turn}"), user(f"u{turn}")]
        tokens = [*tokens, 5, 6]
    (sample,) = session.samples(extra_metadata={"b": 2})
    assert sample.tokens == tokens[:-2]
    assert sample.loss_mask == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert (sample.rollout_id, sample.group_index, sample.reward, sample.label) == (7, 3, 1.5, "l")
    assert sample.metadata["segment"] == "final"
    assert (sample.metadata["a"], sample.metadata["b"], sample.metadata["turns"]) == (1, 2, 3)
    assert tally([sample])["turns_clean"] == 2
    assert not session.manager.has_session(SID)
    assert trained([sample]) == [*range(1000, 1009)]


def test_a_turn_is_known_by_its_handle_whatever_became_of_its_text():
    session = Session(fork_threshold_tokens=0)
    first = session.turn([user("q")], [1], "Edit(a)", handle="call_1")
    session.turn([user("q"), assistant("Edit(a, replace_all)", "call_1"), user("ok")], [*first, 9], "done")
    (sample,) = session.samples()
    assert sample.loss_mask == [1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize(("threshold", "rows", "lost"), [(2, 1, 2), (1, 2, 0), (0, 2, 0)])
def test_a_rewritten_turn_is_realigned_only_where_little_is_lost(threshold, rows, lost):
    session = Session(fork_threshold_tokens=threshold)
    first = session.turn([user("q")], [1, 2], "abc")
    session.turn([user("q"), assistant("xyz"), user("ok")], [*first[:3], 50, 51, 9], "done")
    samples = session.samples()
    assert len(samples) == rows
    assert tally(samples)["tokens_realigned"] == lost
    assert len(trained(samples)) == 6 - lost
    if rows == 1:
        assert samples[0].tokens == [1, 2, 1000, 50, 51, 9, 1003, 1004, 1005]
        assert samples[0].loss_mask == [1, 0, 0, 0, 1, 1, 1]


def test_compaction_that_keeps_the_last_turn_trains_it_once():
    session = Session(fork_threshold_tokens=0)
    one = session.turn([user("q")], [1], "a", handle="h1")
    history = [user("q"), assistant("a", "h1"), user("r")]
    two = session.turn(history, [*one, 2], "b", handle="h2")
    session.turn([user("summary"), assistant("b", "h2"), user("s")], [3, *two[-3:], 4], "c")
    frozen, final = session.samples()
    assert frozen.metadata["segment"] == "wipe"
    assert final.metadata["segment"] == "final"
    assert final.loss_mask == [1, 1, 1]
    assert sorted(trained([frozen, final])) == [*range(1000, 1009)]


def test_sub_agents_are_told_by_origin_or_by_their_system_prompt():
    session = Session()
    session.turn([system("main"), user("q")], [1], "a")
    session.turn([system("helper"), user("x")], [2], "b")
    session.turn([user("y")], [3], "c", origin="subagent", agent="x")
    session.turn([system("changed"), user("z")], [4], "d", agent="main")
    segments = [sample.metadata["segment"] for sample in session.samples()]
    assert segments == ["wipe", "subagent", "subagent", "final"]


def test_side_requests_and_abandoned_answers_are_counted_not_trained():
    session = Session()
    session.turn([user("title")], [1], "t", origin="side", size=5)
    session.turn([user("q")], [2], "cut", finish_reason="length", size=4)
    session.turn([user("q")], [2], "whole", size=2)
    session.turn([user("gone")], [3], "?", delivered=False, size=7)
    samples = session.samples()
    assert len(trained(samples)) == 2
    counts = tally(samples)
    assert (counts["tokens_side"], counts["tokens_abandoned"], counts["tokens"]) == (5, 11, 18)
    assert (counts["turns_side"], counts["turns_abandoned"]) == (1, 2)


def test_they_are_trained_where_that_is_wanted():
    session = Session(keep_side=True, keep_abandoned=True)
    session.turn([user("title")], [1], "t", origin="side")
    session.turn([user("gone")], [3], "?", delivered=False)
    assert len(trained(session.samples())) == 6


def test_answers_to_one_prompt_that_were_both_taken_are_both_trained():
    session = Session()
    session.turn([user("q")], [1], "a")
    session.turn([user("q")], [1], "b")
    assert len(trained(session.samples())) == 6


def test_an_answer_that_was_asked_for_again_and_passed_over_is_abandoned():
    session = Session()
    session.turn([user("q")], [1], "a")
    again = session.turn([user("q")], [1], "b")
    session.turn([user("q"), assistant("b"), user("x")], [*again, 2], "c")
    samples = session.samples()
    assert trained(samples) == [*again[1:], *range(1006, 1009)]
    assert tally(samples)["tokens_abandoned"] == 3


def test_a_turn_that_two_branches_share_is_trained_in_the_first():
    session = Session()
    base = session.turn([user("q")], [1], "a")
    for branch in "xy":
        session.turn([user("q"), assistant("a"), user(branch)], [*base, 2], branch)
    first, second = session.samples()
    assert first.loss_mask == [1, 1, 1, 0, 1, 1, 1]
    assert second.loss_mask == [0, 0, 0, 0, 1, 1, 1]


def test_a_prompt_that_departs_earlier_begins_another_sample():
    session = Session()
    base = session.turn([user("q")], [1, 2], "a")
    session.turn([user("q"), assistant("a"), user("x")], [9, *base[1:], 3], "b")
    assert [sample.loss_mask for sample in session.samples()] == [[1, 1, 1], [1, 1, 1]]


def test_samples_are_cut_to_the_longest_that_trains():
    session = Session()
    base = session.turn([user("q")], [1], "a")
    session.turn([user("q"), assistant("a"), user("x")], [*base, 2], "b")
    (sample,) = session.samples(max_sample_tokens=6)
    assert sample.loss_mask == [1, 1, 1, 0, 1]
    assert sample.status is Sample.Status.TRUNCATED
    assert tally([sample])["tokens_truncated"] == 2
    assert session.manager.totals.unaccounted == 0


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")]
)
def test_the_status_is_that_of_the_last_turn(reason, status):
    session = Session()
    session.turn([user("q")], [1], "a", finish_reason=reason)
    (sample,) = session.samples()
    assert sample.status.value == status
    assert sample.metadata["truncated"] == (reason == "length")


def test_the_policy_version_is_known_for_each_token():
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    session = Session()
    base = session.turn([user("q")], [1], "a", weight_versions=spans)
    late = [{"version": "5", "start": 0, "end": 3}]
    session.turn([user("q"), assistant("a"), user("x")], [*base, 2], "b", weight_versions=late)
    (sample,) = session.samples()
    assert sample.metadata["weight_version_spans"] == [("4", 0, 2), ("5", 2, 3), ("5", 4, 7)]
    assert sample.weight_versions == ["4", "5"]


def test_unknown_log_probs_are_none_rather_than_zero():
    manager = TrajectoryManager()
    turn = TurnRecord([1], [2, 3], "stop")
    manager.record_turn(SID, turn=turn, prompt_messages=[user("q")], response_message=assistant("a"))
    (sample,) = manager.get_trajectory(SID, base_sample=Sample(index=0))
    assert sample.rollout_log_probs is None


def test_log_probs_of_another_number_are_refused():
    manager = TrajectoryManager()
    turn = TurnRecord([1], [2, 3], "stop", [-1.0])
    with pytest.raises(ValueError, match="output_log_probs has 1 entries, output_ids has 2"):
        manager.record_turn(SID, turn=turn, prompt_messages=[user("q")], response_message=assistant("a"))


def test_a_turn_without_a_prompt_is_not_recorded(caplog):
    manager = TrajectoryManager()
    turn = TurnRecord([], [2], "stop")
    manager.record_turn(SID, turn=turn, prompt_messages=[user("q")], response_message=assistant("a"))
    assert manager.turn_count(SID) == 0
    assert "without a prompt" in caplog.text


def test_a_turn_keeps_memory_for_its_new_tokens_only():
    session = Session()
    history, tokens = [user("q")], list(range(500))
    for turn in range(20):
        tokens = [*session.turn(history, tokens, f"a{turn}"), 5]
        history = [*history, assistant(f"a{turn}"), user(f"u{turn}")]
    nodes = session.manager._trees[SID].turns
    assert sum(node.turn.delta.size + node.turn.output.size for node in nodes) == 500 + 19 + 60
    assert nodes[-1].turn.held().tolist() == tokens[:-1]


ACTIONS = st.sampled_from(["go on", "rewrite", "branch", "compact", "replay", "side", "cut", "new"])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(ACTIONS, st.integers(0, 10), st.integers(1, 4)), max_size=25), st.sampled_from([0, 3])
)
def test_whatever_clients_do_each_token_is_trained_once_or_counted(actions, threshold):
    session = Session(fork_threshold_tokens=threshold)
    chains = []
    for number, (action, pick, size) in enumerate(actions):
        origin, reason = ("side" if action == "side" else "main"), ("length" if action == "cut" else "stop")
        if not chains or action in ("new", "side"):
            history, prompt = [user(f"q{number}")], [number + 1]
        else:
            said, tokens, handle = chains[pick % len(chains)]
            last = said[-1] | {"handles": [handle]}
            if action == "rewrite":
                last, tokens = assistant(f"other {number}"), [*tokens[:-1], 500 + number]
            if action == "compact":
                history, prompt = [user(f"sum{number}"), last, user("go")], [900 + number, *tokens[-2:], 7]
            elif action == "replay":
                history, prompt = said[:-1], tokens[: tokens.index(min(t for t in tokens if t >= 1000))]
            else:
                history, prompt = [*said[:-1], last, user(f"u{number}")], [*tokens, 8]
        reply, handle = f"a{number}", f"h{number}"
        tokens = session.turn(
            history, prompt, reply, size=size, handle=handle, origin=origin, finish_reason=reason
        )
        chains.append(([*history, assistant(reply)], tokens, handle))
    samples = session.samples()
    found = trained(samples)
    assert len(found) == len(set(found))
    counts = session.manager.totals
    assert counts.unaccounted == 0
    assert counts.tokens_trained == len(found)
    assert counts.tokens == sum(size for _, _, size in actions)
    assert counts.tokens_realigned == 0 or threshold
    assert all(sum(sample.loss_mask) for sample in samples)


def test_routes_of_experts_come_from_the_newest_turn():
    session = Session()
    routes = np.arange(2 * (1 + 3 - 1), dtype=np.int32)
    encoded = base64.b64encode(routes.tobytes()).decode()
    session.turn([user("q")], [1], "a", routed_experts=encoded)
    (sample,) = session.samples(max_sample_tokens=3)
    assert sample.rollout_routed_experts.tolist() == [0, 1, 2, 3]


def test_counters_of_speculative_decoding_are_those_of_the_turns_of_a_row():
    session = Session()
    first = session.turn([user("q")], [1], "a", spec_info=SpecInfo(2, 4, 1, 3))
    session.turn([user("q"), assistant("a"), user("x")], [*first, 2], "b", spec_info=SpecInfo(1, 4, 1, 2))
    (sample,) = session.samples()
    assert sample.spec_info == SpecInfo(3, 8, 2, 5)


def test_routes_of_a_cut_row_come_from_the_whole_one():
    session = Session()
    first = session.turn([user("q")], [1], "a")
    routes = np.arange(2 * (len(first) + 1 + 3 - 1), dtype=np.int32)
    encoded = base64.b64encode(routes.tobytes()).decode()
    history = [user("q"), assistant("a"), user("x")]
    session.turn(history, [*first, 2], "b", routed_experts=encoded)
    (sample,) = session.samples(max_sample_tokens=4)
    assert sample.rollout_routed_experts.tolist() == list(range(6))


def test_a_cut_that_leaves_nothing_to_train_leaves_no_sample():
    session = Session(fork_threshold_tokens=3)
    session.turn([user("q")], [1, 2], "abc")
    session.turn([user("q"), assistant("xyz"), user("ok")], [1, 2, 50, 51, 9], "done")
    assert session.samples(max_sample_tokens=5) == []
    assert session.manager.totals.unaccounted == 0
