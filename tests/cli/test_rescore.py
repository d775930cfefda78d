import dataclasses
import json

import pytest

from slime.cli import main
from slime.rollout import dump
from slime.rollout.outcome import BEFORE_FAILURE
from slime.rollout.rewarding import INVALID_KEY
from slime.utils.types import Sample
from tests.rollout.test_hooks import HERE

DONE, CUT, FAILED, ABORTED = (
    Sample.Status.COMPLETED,
    Sample.Status.TRUNCATED,
    Sample.Status.FAILED,
    Sample.Status.ABORTED,
)


def stored(index, response, reward, *, group=0, rollout=None, status=DONE, **fields):
    return Sample(
        index=index,
        group_index=group,
        rollout_id=index if rollout is None else rollout,
        response=response,
        response_length=2,
        tokens=[1, 2, 3],
        label="4",
        reward=reward,
        status=status,
        **fields,
    )


def rescored(tmp_path, samples, *flags, code=0):
    """Rescore a dump; gives the new samples, and sees to it that the old file stays as it was."""
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    dump.save(str(old), 0, samples)
    before = old.read_bytes()
    assert main(["rescore", str(old), "--out", str(new), *flags]) == code
    assert old.read_bytes() == before
    return dump.load_file(new)


def test_new_rewards_are_written_and_compared_with_the_old_ones(tmp_path, capsys):
    samples = [
        stored(0, r"\boxed{4}", 1.0),
        stored(1, r"\boxed{5}", 1.0),
        stored(2, r"\boxed{4.0}", 0.0, status=CUT),
        stored(3, "4", 0.0, group=1),
    ]
    new = rescored(tmp_path, samples, "--rm-type", "math")
    assert [sample.reward for sample in new] == [1.0, 0.0, 1.0, 0.0]
    assert [sample.status for sample in new] == [DONE, DONE, CUT, DONE]
    assert new[3].metadata == {INVALID_KEY: "no_box"}
    text = capsys.readouterr().out
    assert "0.5000 (2 of 4; 1 raised, 1 lowered)" in text
    assert "0.5000 -> 0.5000 (of 4 with both)" in text
    assert "1 (no_box 1)" in text


def test_only_the_reward_of_a_sample_changes(tmp_path):
    sample = stored(0, r"\boxed{4}", 0.0, loss_mask=[1, 0], rollout_log_probs=[-1.0, 0.0], session_id="s")
    (new,) = rescored(tmp_path, [sample], "--rm-type", "math")
    assert dataclasses.replace(new, reward=0.0) == sample


def test_a_reward_that_had_failed_is_scored_and_the_rest_is_left_as_it_is(tmp_path, capsys):
    failure = {"failure": "reward: timeout in judge: it hung", BEFORE_FAILURE: {"status": "truncated"}}
    samples = [
        stored(0, r"\boxed{4}", None, status=FAILED, remove_sample=True, metadata=failure),
        stored(1, "", None, status=FAILED, metadata={"failure": "generate: ValueError in f: no"}),
        stored(2, "", None, status=ABORTED),
    ]
    first, second, third = rescored(tmp_path, samples, "--rm-type", "math")
    assert (first.reward, first.status, first.remove_sample, first.metadata) == (1.0, CUT, False, {})
    assert second == samples[1]
    assert third == samples[2]
    text = capsys.readouterr().out
    assert "generate: ValueError 1" in text
    assert "aborted 1" in text
    assert "without a reward before, scored now" in text


def test_law_4_a_check_that_breaks_fails_the_rollout_with_its_reason(tmp_path, capsys):
    samples = [stored(0, r"\boxed{4}", 1.0), stored(1, r"\boxed{4}", 1.0)]
    samples[1].label = None
    first, second = rescored(tmp_path, samples, "--rm-type", "math")
    assert first.reward == 1.0
    assert (second.reward, second.status, second.remove_sample) == (None, FAILED, True)
    assert second.metadata["failure"].startswith("reward: no_label")
    assert "1 (reward: no_label 1)" in capsys.readouterr().out


def test_the_exit_code_tells_that_nothing_was_scored(tmp_path):
    rescored(tmp_path, [stored(0, "x", 1.0)], "--custom-rm-path", HERE + "reward_raises", code=1)


def test_a_failed_rescoring_can_be_rescored(tmp_path):
    (failed,) = rescored(
        tmp_path,
        [stored(0, r"\boxed{4}", 1.0, status=CUT)],
        "--custom-rm-path",
        HERE + "reward_raises",
        code=1,
    )
    (tmp_path / "again").mkdir()
    (mended,) = rescored(tmp_path / "again", [failed], "--rm-type", "math")
    assert (mended.reward, mended.status, mended.remove_sample, mended.metadata) == (1.0, CUT, False, {})


def test_flags_win_over_the_samples_own_reward_which_is_kept(tmp_path):
    sample = stored(0, "4", 0.0, metadata={"rm_type": "math"}, custom_rm_path=HERE + "reward_half")
    (new,) = rescored(tmp_path, [sample], "--rm-type", "f1")
    assert (new.reward, new.metadata, new.custom_rm_path) == (1.0, {"rm_type": "math"}, HERE + "reward_half")
    (tmp_path / "own").mkdir()
    (new,) = rescored(tmp_path / "own", [sample])
    assert new.reward == 0.5


@pytest.mark.parametrize("hook", ["reward_group", "reward_sync_group"])
def test_groups_are_rewarded_together_flat_and_with_siblings(tmp_path, hook):
    samples = [
        stored(0, "a", 0.0, rollout=0),
        stored(1, "b", 0.0, rollout=0),
        stored(2, "c", 0.0, rollout=1),
        stored(3, "d", 0.0, group=1),
    ]
    new = rescored(tmp_path, samples, "--custom-rm-path", HERE + hook, "--group-rm")
    expected = [0.25] * 4 if hook == "reward_sync_group" else [3.0, 3.0, 3.0, 1.0]
    assert [sample.reward for sample in new] == expected


def test_a_reward_of_several_values_is_compared_by_its_key(tmp_path, capsys):
    samples = [stored(0, "Answer: 4", {"score": -1.0}), stored(1, "Answer: 4", 1.0)]
    new = rescored(tmp_path, samples, "--rm-type", "dapo", "--reward-key", "score")
    assert [sample.reward["acc"] for sample in new] == [True, True]
    assert "0.5000 (1 of 2; 1 raised, 0 lowered)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rm-type", "maths"], "did you mean 'math'"),
        ([], "no reward is configured"),
        (["--rm-type", "math", "--out", "{old}"], "is there already"),
        (["--rm-type", "math", "--concurrency", "0"], "--concurrency"),
        (["--rm-typ", "math"], "rm-type"),
        (["--custom-rm-path", HERE + "gone"], "--custom-rm-path"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, capsys, flags, message):
    old = dump.save(str(tmp_path / "old.jsonl"), 0, [stored(0, "4", 0.0)])
    before = old.read_bytes()
    assert main(["rescore", str(old), *(flag.format(old=old) for flag in flags)]) == 2
    assert message in capsys.readouterr().err
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_a_damaged_dump_is_named_with_its_line(tmp_path, capsys):
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps({"index": 0}) + "\nnothing\n")
    assert main(["rescore", str(path), "--rm-type", "math"]) == 2
    assert "old.jsonl:2" in capsys.readouterr().err
