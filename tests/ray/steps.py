"""What a run writes after a rollout step, without a run. Imports no pytest: a test runs this in processes."""

import json

from slime.ray.checkpoint_writer import CheckpointWriter
from slime.ray.lineage import Trained
from slime.utils.parts import declare, files_below

PARTS = {"trainer/model.safetensors": b"m" * 4096, "trainer/trainer.json": b"{}", "critic/model.bin": b"c"}


def position(root, step):
    path = root / "rollout" / f"data_source_{step}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"sample_offset": step}))
    return declare(root, [path])


def write(root, step, writer=None, *, commit=True):
    """What a run does after a rollout step, up to the commit."""
    writer = writer or CheckpointWriter(root)
    writer.take_position(step, position(root, step))
    folder = writer.begin(step)
    for name, content in PARTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if commit:
        parts = [part for name in ("trainer", "critic") for part in declare(root, files_below(folder / name))]
        writer.commit(step, parts, policy_version=step + 1, trained=Trained(step, step, "d"))
    return folder
