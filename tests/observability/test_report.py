"""The report tells before and after, and where everything is."""

from slime.observability.console import COLUMNS, PlainConsole, header, row
from slime.observability.report import evaluation_scores, report_lines
from slime.observability.trackers import JsonLines


def test_the_report_compares_first_and_last_evaluation(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    tracker.log({"eval/sums": 0.2, "eval/sums-truncated_ratio": 0.1}, 0)
    tracker.log({"rollout/raw_reward": 0.3}, 0)
    tracker.log({"rollout/raw_reward": 0.7}, 1)
    tracker.log({"eval/sums": 0.5}, 2)
    tracker.close()
    text = "\n".join(report_lines(tmp_path, {"checkpoint": tmp_path / "c", "model folder": None}))
    assert "accuracy on sums: 0.200 before, 0.500 after 2 steps, 2.5 times as much" in text
    assert "0.300 in the first step, 0.700 in the last" in text
    assert f"slime view {tmp_path}" in text and "model folder" not in text
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_not_taken_for_scores():
    assert evaluation_scores([{"step": 0, "eval/a": 1.0, "eval/a-truncated_ratio": 0.5, "eval/a/x": 2}]) == {
        "a": [(0, 1.0)]
    }


def test_a_missing_metric_shows_as_a_dash_and_rows_align(capsys):
    console = PlainConsole()
    console.step(3, {"rollout/raw_reward": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [header(), row(3, {"rollout/raw_reward": 0.5})]
    assert len(lines[0]) == len(lines[1]) <= 110
    assert lines[1].split() == ["3", "0.500"] + ["-"] * (len(COLUMNS) - 2)
