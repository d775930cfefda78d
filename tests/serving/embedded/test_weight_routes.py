"""New weights over HTTP: from a folder, from shared memory, from safetensors; and what is refused."""

import base64
import json
import shutil

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from slime.serving.background import ServerHandle
from slime.serving.embedded.engine import Engine
from slime.serving.weights.shared import SharedWeights
from tests.serving.engines import CONFIG
from tests.serving.wire import call, ok
from tests.tiny import tiny_model, tiny_model_dir

PROMPT = [70, 71, 72, 73, 74, 75]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [tiny_model_dir(root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture
def url(folders):
    with ServerHandle(Engine(str(folders[0]), CONFIG), CONFIG) as handle:
        yield handle.url


def scores(url):
    """The engine's log-probs of the prompt, and the weight version that it names."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    meta = ok(url, "/generate", body | {"return_logprob": True})["meta_info"]
    return [value for value, *_ in meta["input_token_logprobs"][1:]], meta["weight_version"]


def expected(model):
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [logprobs[i, token].item() for i, token in enumerate(PROMPT[1:])]


def swap(url, load_format, payload, version="v1"):
    """One whole update session; the answer of the update."""
    ok(url, "/begin_weight_update", {})
    try:
        body = {"serialized_named_tensors": payload, "load_format": load_format, "weight_version": version}
        return call(url, "/update_weights_from_tensor", body)
    finally:
        ok(url, "/end_weight_update", {})


def test_weights_of_a_folder_take_over(url, folders):
    before, version = scores(url)
    assert version == "default"
    assert before == pytest.approx(expected(tiny_model(seed=0)), abs=1e-4)
    body = {"model_path": str(folders[1]), "weight_version": "disk"}
    assert ok(url, "/update_weights_from_disk", body) == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to disk.",
        "num_paused_requests": 0,
    }
    after, version = scores(url)
    assert version == "disk"
    assert after == pytest.approx(expected(tiny_model(seed=1)), abs=1e-4)


def test_shared_weights_are_followed_without_copies(url, tmp_path):
    model = tiny_model(seed=3)
    shared = SharedWeights.create(model.named_parameters(), tmp_path / "w.safetensors")
    for name, parameter in model.named_parameters():
        parameter.data = shared.views[name]
    assert swap(url, "shared_memory", [str(shared.path)], "1")[0] == 200
    first, version = scores(url)
    assert (first, version) == (pytest.approx(expected(model), abs=1e-4), "1")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert swap(url, "shared_memory", [str(shared.path)], "2")[0] == 200
    second, version = scores(url)
    assert (second, version) == (pytest.approx(expected(model), abs=1e-4), "2")
    assert first != pytest.approx(second, abs=1e-3)


def test_a_folder_after_shared_weights_leaves_the_trainers_memory_alone(url, folders, tmp_path):
    model = tiny_model(seed=3)
    shared = SharedWeights.create(model.named_parameters(), tmp_path / "w.safetensors")
    swap(url, "shared_memory", [str(shared.path)])
    ok(url, "/update_weights_from_disk", {"model_path": str(folders[1])})
    assert scores(url)[0] == pytest.approx(expected(tiny_model(seed=1)), abs=1e-4)
    assert all(torch.equal(shared.views[name], tensor) for name, tensor in model.named_parameters())


def test_a_new_file_at_the_same_path_is_mapped_anew(url, tmp_path):
    path = tmp_path / "w.safetensors"
    for seed in (4, 5):
        model = tiny_model(seed=seed)
        shared = SharedWeights.create(model.named_parameters(), path)
        assert swap(url, "shared_memory", [str(path)])[0] == 200
        assert scores(url)[0] == pytest.approx(expected(model), abs=1e-4)
        shared.unlink()


def test_safetensors_in_the_request_are_copied_in(url):
    model = tiny_model(seed=6)
    names = sorted(dict(model.named_parameters()))
    halves = [names[::2], names[1::2]]
    blobs = [save({n: model.get_parameter(n).data.contiguous() for n in half}) for half in halves]
    payload = [base64.b64encode(blob).decode() for blob in blobs]
    assert swap(url, "safetensors", payload)[0] == 200
    assert scores(url)[0] == pytest.approx(expected(model), abs=1e-4)


def test_a_tensor_update_outside_a_session_is_refused(url):
    body = {"serialized_named_tensors": ["x"], "load_format": "shared_memory"}
    status, answer = call(url, "/update_weights_from_tensor", body)
    assert status == 400
    assert "must run between begin_weight_update() and end_weight_update()" in answer["message"]


def test_a_session_begins_once_and_ends_once(url):
    assert ok(url, "/begin_weight_update", {})["success"]
    assert call(url, "/begin_weight_update", {})[0] == 400
    assert ok(url, "/end_weight_update", {})["success"]
    assert call(url, "/end_weight_update", {})[0] == 400


def without_one_weight():
    weights = {name: tensor.data for name, tensor in tiny_model(seed=0).named_parameters()}
    del weights["model.norm.weight"]
    return [base64.b64encode(save(weights)).decode()]


@pytest.mark.parametrize(
    ("load_format", "payload", "message"),
    [
        (
            None,
            ["gASV"],
            "load_format must be one of shared_memory, shared_memory_copy, safetensors; got None",
        ),
        ("flattened_bucket", ["gASV"], "pickles, which this engine never reads"),
        ("safetensors", [], "must be a non-empty list of strings"),
        ("safetensors", ["%%%"], "not base64 of safetensors"),
        ("safetensors", ["AAAA"], "not base64 of safetensors"),
        ("safetensors", without_one_weight, "model.norm.weight"),
        ("shared_memory", ["/nowhere/w.safetensors"], "cannot map the weight file"),
        ("shared_memory", ["a", "b"], "shared memory takes one path, got 2."),
    ],
)
def test_a_bad_tensor_update_is_refused_and_changes_nothing(url, load_format, payload, message):
    before = scores(url)
    status, answer = swap(url, load_format, payload() if callable(payload) else payload)
    assert status == 400
    assert answer["success"] is False
    assert message in answer["message"]
    assert scores(url) == before


def no_folder(folder):
    return folder / "none"


def other_architecture(folder):
    return tiny_model_dir(folder, arch="qwen2", tie_word_embeddings=False)


def other_shape(folder):
    return tiny_model_dir(folder, hidden_size=32)


def missing_weight(folder):
    tiny_model_dir(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    (folder / "model.safetensors").write_bytes(save(state))
    return folder


def no_weights(folder):
    tiny_model_dir(folder)
    (folder / "model.safetensors").unlink()
    return folder


def broken_weights(folder):
    tiny_model_dir(folder)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    return folder


def broken_config(folder):
    tiny_model_dir(folder)
    (folder / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_folder, "no such model folder"),
        (other_architecture, "architecture is ['Qwen2ForCausalLM'], the engine runs ['LlamaForCausalLM']"),
        (other_shape, "has shape"),
        (missing_weight, "lm_head.weight"),
        (no_weights, "no .safetensors files in the folder"),
        (broken_weights, "not a safetensors file"),
        (broken_config, "cannot read config.json"),
    ],
)
def test_a_bad_folder_is_refused_and_changes_nothing(url, tmp_path, make, message):
    before = scores(url)
    status, answer = call(url, "/update_weights_from_disk", {"model_path": str(make(tmp_path / "m"))})
    assert status == 400
    assert answer["success"] is False
    assert message in answer["message"]
    assert scores(url) == before


def test_a_tied_model_takes_a_folder_with_and_without_its_head(tmp_path):
    folder = tiny_model_dir(tmp_path / "tied", tie_word_embeddings=True)
    with_head = shutil.copytree(folder, tmp_path / "with_head")
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in state
    (with_head / "model.safetensors").write_bytes(save(state))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    with ServerHandle(Engine(str(folder), CONFIG), CONFIG) as handle:
        for path in (folder, with_head):
            ok(handle.url, "/update_weights_from_disk", {"model_path": str(path)})
            assert scores(handle.url)[0] == pytest.approx(expected(model), abs=1e-4)
