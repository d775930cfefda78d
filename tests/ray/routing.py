"""The routers of a run, for tests."""

import contextlib

from slime.config import load_config
from slime.ray.routers import Routers, host_and_port
from slime.serving.topology import single_model


def words(folder):
    """Flags of a run, whose model and data are made in `folder`."""
    (folder / "config.json").write_text("{}")
    (folder / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    return [
        *("--hf-checkpoint", str(folder), "--prompt-data", str(folder / "data.jsonl")),
        *("--rm-type", "math", "--label-key", "label", "--num-rollout", "1", "--rollout-batch-size", "1"),
        *("--rollout-max-response-len", "16", "--n-samples-per-prompt", "2"),
    ]


@contextlib.contextmanager
def routers(folder, engines, restarts, router_url=None):
    """Those of a run with one model, which so many engines serve; they are ended behind the block.

    Args:
        router_url: of one that runs already.
    """
    more = [] if restarts is None else ["--use-fault-tolerance"]
    if router_url is not None:
        host, port = host_and_port(router_url)
        more += ["--sglang-router-ip", host, "--sglang-router-port", str(port)]
    config = load_config([*words(folder), *more])
    topology = single_model("models/actor", num_gpus=engines)
    made = Routers(config, topology, "embedded", folder, host=None, restarts=restarts)
    try:
        yield made
    finally:
        made.close()


def url_of(made):
    """Where the model is asked."""
    host, port = made.addresses()["default"]
    return f"http://{host}:{port}"
