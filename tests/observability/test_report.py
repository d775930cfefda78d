"""The report tells before and after, and where everything is."""

from slime.observability.console import COLUMNS, PlainConsole, header, row
from slime.observability.report import evaluation_scores, program, report_lines
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
    assert f"{program()} view {tmp_path}" in text and program().endswith("slime")
    assert "model folder" not in text
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_law_5_the_identity_is_printed_per_step_and_in_total(tmp_path):
    step = {"submitted": 12, "trained": 8, "failed": 3, "requeued": 1, "in_flight": 0, "failed/timeout": 3}
    metrics = {f"rollout/accounting/{name}": float(count) for name, count in step.items()}
    assert row(0, metrics).endswith(" 0+12=8+0+3+1+0")
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    tracker.log(metrics, 0)
    tracker.log(metrics, 1)
    tracker.close()
    text = "\n".join(report_lines(tmp_path, {}))
    assert "24 submitted = 16 trained + 0 filtered + 6 failed + 2 requeued + 0 in flight" in text
    assert "failed: timeout: 6" in text


def test_law_5_rollouts_in_flight_are_carried_or_were_stopped_with_the_run(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    for carried, submitted, in_flight in [(0, 12, 4), (4, 8, 4), (0, 16, 8)]:
        step = {"carried": carried, "submitted": submitted, "trained": 8, "in_flight": in_flight}
        tracker.log({f"rollout/accounting/{name}": float(count) for name, count in step.items()}, 0)
    tracker.close()
    text = "\n".join(report_lines(tmp_path, {}))
    assert "36 submitted = 24 trained + 0 filtered + 0 failed + 4 requeued + 8 in flight" in text
    assert "requeued: the run stopped: 4" in text


def test_ratios_are_not_taken_for_scores():
    assert evaluation_scores([{"step": 0, "eval/a": 1.0, "eval/a-truncated_ratio": 0.5, "eval/a/x": 2}]) == {
        "a": [(0, 1.0)]
    }


def test_a_missing_metric_shows_as_a_dash_and_rows_align(capsys):
    console = PlainConsole()
    console.step(3, {"rollout/raw_reward": 0.5})
    text = capsys.readouterr().out
    assert text == header() + "\n" + row(3, {"rollout/raw_reward": 0.5}) + "\n"
    _, titles, values = text.splitlines()
    assert len(titles) <= len(values) + 1 <= 110
    assert values.split() == ["3", "0.500"] + ["-"] * (len(COLUMNS) - 2)
