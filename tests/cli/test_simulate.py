"""`slime simulate` and `slime replay` on the terminal."""

import random

import pytest

from slime.cli import main
from slime.rollout.policy import FullyAsynchronous
from slime.rollout.scheduling import Limits
from slime.rollout.simulation import Setting, simulate

SMALL = ["--steps", "6", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--concurrency", "16"]


@pytest.fixture
def run(tmp_path):
    """The folder of a run that was played."""
    rng = random.Random(0)
    setting = Setting(
        policy=FullyAsynchronous(8),
        limits=Limits(wanted=4, group_size=2, max_staleness=2),
        slots=16,
        draw=lambda: rng.lognormvariate(0, 1),
        steps=6,
        ahead=True,
        train_seconds=1.0,
    )
    simulate(setting, tmp_path / "events.jsonl")
    return tmp_path


@pytest.mark.parametrize("durations", ["lognormal:5,1", "pareto:2,1.5", "constant:3"])
def test_every_policy_is_compared(durations, capsys):
    assert main(["simulate", durations, *SMALL, "--max-staleness", "1", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in ("synchronous", "partial", "ahead"))
    assert printed.count("fully_async") == 2


def test_durations_of_a_run_are_drawn_again(run, capsys):
    assert main(["simulate", str(run), *SMALL, "--policies", "fully_async", "--max-staleness", "2"]) == 0
    assert "rollouts take" in capsys.readouterr().out


def test_durations_of_a_histogram_are_drawn_by_their_counts(tmp_path, capsys):
    (tmp_path / "bins.csv").write_text("2,99\n\n4.5,0\n100,1\n")
    assert main(["simulate", str(tmp_path / "bins.csv"), *SMALL, "--policies", "synchronous"]) == 0
    assert "2.0 s in the median" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "message"), [("2,x", "line 1"), ("", "holds no durations"), ("-1", "line 1")]
)
def test_a_line_that_is_no_bin_is_an_error(tmp_path, capsys, text, message):
    (tmp_path / "bins.csv").write_text(text)
    assert main(["simulate", str(tmp_path / "bins.csv"), *SMALL]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", ["uniform:1,2", "lognormal:", "pareto:0,0", "lognormal:a,b", "nowhere"])
def test_what_is_no_distribution_is_an_error_that_says_what_is(words, capsys):
    assert main(["simulate", words, *SMALL]) == 2
    assert "lognormal:20,1.0" in capsys.readouterr().err


def test_a_replay_tells_whether_the_batches_are_the_same(run, capsys):
    assert main(["replay", str(run)]) == 0
    assert "6 batches, 0 different" in capsys.readouterr().out
    log = run / "events.jsonl"
    log.write_text(
        log.read_text().replace(
            '"event":"close","step":2,"groups":[', '"event":"close","step":2,"groups":[999,'
        )
    )
    assert main(["replay", str(run)]) == 1
    assert "step 2: 5 groups, differs" in capsys.readouterr().out
