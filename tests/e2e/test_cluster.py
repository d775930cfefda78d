"""Whole runs on several Ray nodes of this machine, with GPUs that Ray is told of: seats, and a lost node."""

import pytest

from tests.e2e.kills import Life, steps_logged, until

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch):
    """A head for the driver, one node for the trainer, one for an engine; runs join it."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for address in ("127.0.0.2", "127.0.0.3"):
        cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address=address)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def test_engine_and_trainer_take_turns_on_one_gpu(world, cluster):
    text = world.train("shared", colocate=True, num_rollout=3, num_gpus_per_node=1)
    assert "placement               1 GPU (trainer 1, engines 1; colocate)" in text
    place = next(line for line in text.splitlines() if "train rank 0" in line).partition(": ")[2]
    assert f"engine default/regular-0: {place}" in text
    rows = [row for row in world.metrics("shared") if "train/loss" in row]
    assert len(rows) == 3
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows)


def test_an_engine_of_a_lost_node_goes_on_at_another_and_nothing_is_lost(world, cluster):
    name = "cluster"
    metrics, log = world.folder / name / "metrics.jsonl", world.folder / f"{name}.log"
    flags = world.flags(
        name,
        num_rollout=8,
        rollout_num_gpus=1,
        num_gpus_per_node=1,
        use_fault_tolerance=True,
        custom_generate_function_path="tests.e2e.hooks.ambles",
    )
    life = Life(flags, log)
    try:
        until(life, lambda: steps_logged(metrics) >= 2)
        assert not life.ended, log.read_text()
        lost = next(node for node in cluster.worker_nodes if node.node_ip_address == "127.0.0.3")
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address="127.0.0.4")
        assert life.process.wait(timeout=300) == 0, log.read_text()
    finally:
        life.kill()
    text = log.read_text()
    assert "engine default/regular-0: GPU 0 of 127.0.0.3" in text
    assert "is started again" in text
    rows = [row for row in world.metrics(name) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(8))
    for row in rows:
        assert row["rollout/accounting/trained"] == 16
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
