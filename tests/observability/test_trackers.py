"""Every metric reaches the disk, under one name."""

from slime.observability.trackers import JsonLines, TensorBoard, Trackers, drop_rows, read_metrics


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


def test_a_resumed_run_takes_out_the_rows_of_what_it_does_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.log({"eval/x": 0.1}, 0)
    for step in range(4):
        tracker.log({"rollout/step": step, "a": step}, step)
        tracker.log({"eval/x": 0.1}, step + 1)
    tracker.close()
    path.write_bytes(path.read_bytes() + b'{"step": 4, "rol')
    whole = path.read_bytes()
    drop_rows(path, step=2, evaluation=3)
    kept = [(row["step"], "eval/x" in row) for row in read_metrics(path)]
    assert kept == [(0, True), (0, False), (1, True), (1, False), (2, True)]
    replaced = tmp_path / "metrics.jsonl.replaced"
    assert path.read_bytes() + replaced.read_bytes() == whole
    drop_rows(path, step=2, evaluation=2)
    assert [(row["step"], "eval/x" in row) for row in read_metrics(path)] == kept[:-1]
    drop_rows(tmp_path / "absent", step=0, evaluation=0)
