"""Every metric reaches the disk, under one name."""

from slime.observability.trackers import JsonLines, TensorBoard, Trackers, read_metrics


def test_metrics_are_written_and_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.log({"train/loss": 0.5}, 0)
    tracker.log({"train/loss": float("nan")}, 1)
    tracker.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[0]["train/loss"] == 0.5 and rows[1]["train/loss"] == "nan"


def test_tensorboard_files_hold_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Trackers([TensorBoard(tmp_path)])
    tracker.log({"train/loss": 0.25}, 3)
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tag = "train/loss"
    value = events.Tensors(tag)[0] if tag in events.Tags()["tensors"] else events.Scalars(tag)[0]
    assert value.step == 3
