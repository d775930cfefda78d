import resource

import numpy as np
import pytest

from slime.errors import CheckpointError, DataError
from slime.rollout import dump
from slime.utils.types import Sample
from tests.rollout.kit import finished


def sample(index, group=0, rollout=None, **fields):
    rollout = index if rollout is None else rollout
    return finished(Sample(index=index, group_index=group, rollout_id=rollout), **fields)


def template(tmp_path):
    return str(tmp_path / "dumps" / "rollout_{rollout_id}.jsonl")


def test_groups_come_back_as_they_were(tmp_path):
    groups = [
        [sample(0), sample(1, status=Sample.Status.FAILED, reward=None)],
        [[sample(2, 1), sample(2, 1)], [sample(3, 1)]],
    ]
    path = dump.save(template(tmp_path), 7, groups)
    assert path.name == "rollout_7.jsonl"
    assert dump.load_groups(template(tmp_path), 7) == groups


def test_law_2_groups_are_found_by_ids_in_any_order(tmp_path):
    samples = [sample(2, 1), sample(0, 0), sample(3, 1), sample(1, 0)]
    dump.save(template(tmp_path), 0, samples)
    groups = dump.load_groups(template(tmp_path), 0)
    assert [[s.index for s in group] for group in groups] == [[2, 3], [0, 1]]


def test_arrays_and_odd_floats_survive(tmp_path):
    routed = np.arange(6, dtype=np.int32).reshape(3, 2)
    written = sample(0, rollout_routed_experts=routed, reward={"score": float("nan")})
    dump.save(template(tmp_path), 0, [[written]])
    (read,) = dump.load_file(dump.dump_path(template(tmp_path), 0))
    assert np.array_equal(read.rollout_routed_experts, routed)
    assert np.isnan(read.reward["score"])


def test_what_json_cannot_hold_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"sample 0: metadata.x .*cannot be written as JSON"):
        dump.save(template(tmp_path), 0, [[sample(0, metadata={"x": object()})]])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"rollout_3.jsonl: cannot read rollouts"):
        dump.load_groups(template(tmp_path), 3)


def test_a_damaged_line_is_named(tmp_path):
    path = dump.save(template(tmp_path), 0, [[sample(0)]])
    path.write_text(path.read_text() + '{"tokens": [1,\n')
    with pytest.raises(DataError, match=r"rollout_0.jsonl:2: is not a sample"):
        dump.load_file(path)


def test_an_empty_dump_is_an_error(tmp_path):
    dump.save(template(tmp_path), 0, [])
    with pytest.raises(DataError, match="holds no samples"):
        dump.load_groups(template(tmp_path), 0)


def test_a_disk_that_is_full_is_an_error_and_leaves_no_half_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rollout_0.jsonl: cannot write rollouts"):
            dump.save(template(tmp_path), 0, [[sample(i, response="x" * 2000) for i in range(9)]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "dumps").iterdir()) == []
