"""Routes of experts that the embedded engine tells: those of the model's own forward, whatever the batch."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.serving.embedded.responses import generate_answer, no_text
from slime.train.experts import ExpertChoice
from slime.utils.routes import decoded_routes
from tests.serving.embedded.harness import generate, request, running, send
from tests.tiny import tiny_model_dir

EXPERTS, TOP_K, LAYERS = 6, 2, 3
SIZES = {
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("moe"), arch="qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def engine(folder):
    with running(folder, chunked_prefill_size=7, max_total_tokens=512) as engine:
        yield engine


def wanted(folder, tokens):
    """Routes [tokens - 1, layers, top_k] of a plain forward; layer 1 has no experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad(), ExpertChoice(EXPERTS, TOP_K) as watched:
        model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
    found = np.zeros((len(tokens) - 1, LAYERS, TOP_K), np.int32)
    for layer, chosen in zip((0, 2), watched.chosen, strict=True):
        found[:, layer] = chosen.numpy()
    return found


def told(update):
    return decoded_routes(update.more_meta["routed_experts"]).reshape(-1, LAYERS, TOP_K)


def asking(prompt, **params):
    made = request(prompt, max_new_tokens=6, ignore_eos=True, **params)
    made.return_routed_experts = True
    return made


def test_each_request_of_a_batch_is_told_the_routes_of_its_own_tokens(engine, folder):
    prompts = [[40 + 3 * k for k in range(n)] for n in (1, 5, 20)]
    silent = request(prompts[1], max_new_tokens=6)
    *asked, quiet = generate(engine, [*map(asking, prompts), silent])
    assert "routed_experts" not in quiet.more_meta
    for prompt, update in zip(prompts, asked, strict=True):
        assert np.array_equal(told(update), wanted(folder, [*prompt, *update.output_ids]))


def test_a_prompt_that_is_kept_is_computed_again_for_its_routes(engine, folder):
    prompt = [60 + k for k in range(12)]
    first, again = (generate(engine, [asking(prompt)])[0] for _ in range(2))
    assert np.array_equal(told(again), told(first))
    assert again.cached_tokens == 0


def test_routes_before_the_wanted_start_are_left_out(engine):
    prompt = [50 + k for k in range(9)]
    whole = generate(engine, [asking(prompt)])[0]
    later = asking(prompt)
    later.routed_experts_start_len = 4
    part = generate(engine, [later])[0]
    assert np.array_equal(told(part), told(whole)[4:])


def test_the_answer_holds_them_where_sglang_puts_them(engine):
    made = asking([70, 71, 72])
    (update,) = generate(engine, [made])
    meta = generate_answer(made, update, latency=0.0, token_text=no_text)["meta_info"]
    assert len(decoded_routes(meta["routed_experts"])) == (3 + 6 - 1) * LAYERS * TOP_K


def test_a_request_that_ends_before_its_prompt_is_computed_tells_none(engine):
    engine.pause("in_place")
    inbox = send(engine, asking([80 + k for k in range(9)]))
    engine.abort_all()
    engine.resume()
    update = inbox.result()
    assert update.finish_reason["type"] == "abort" and not update.more_meta


def test_a_dense_model_has_none(tmp_path, engine):
    with running(tiny_model_dir(tmp_path / "dense")) as dense:
        assert engine.tells_routes and not dense.tells_routes
        (update,) = generate(dense, [asking([40, 41, 42])])
    assert not update.more_meta and len(update.output_ids) == 6
