from types import SimpleNamespace

import pytest

from slime.errors import HookError
from slime.rollout.log_hooks import EVALUATIONS, ROLLOUTS, has_logged

HERE = "tests.rollout.test_log_hooks."


def says(rollout_id, args, samples, extra_metrics, seconds):
    return args.answer


async def says_later(rollout_id, args, samples, extra_metrics, seconds):
    return True


def breaks(rollout_id, args, data, extra_metrics):
    raise KeyError("loss")


def ask(name, dest=ROLLOUTS, **values):
    args = SimpleNamespace(**{dest: name and HERE + name}, **values)
    return has_logged(args, dest, *([0, args, [], {}, 1.0] if dest == ROLLOUTS else [0, args, {}, {}]))


@pytest.mark.parametrize(("answer", "logged"), [(True, True), (False, False), (None, False)])
def test_slime_logs_unless_the_hook_says_that_it_has(answer, logged):
    assert ask("says", answer=answer) is logged
    assert ask(None) is False


@pytest.mark.parametrize("answer", ["logged", 1, []])
def test_another_answer_is_told_by_name(answer):
    with pytest.raises(HookError, match=r"--custom-rollout-log-function-path \(\S+says\): returned"):
        ask("says", answer=answer)


def test_an_async_hook_is_no_yes():
    with pytest.raises(HookError, match="is async"):
        ask("says_later")


def test_what_it_raises_names_flag_and_path():
    with pytest.raises(
        HookError, match=r"--custom-eval-rollout-log-function-path .*breaks\): raised KeyError"
    ):
        ask("breaks", EVALUATIONS)
