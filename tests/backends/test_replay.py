"""Rollout routing replay in the torch trainer, on tiny mixtures of experts in float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slime.backends.base import StepRow
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError, ModelError
from slime.train.experts import ExpertChoice
from slime.utils.routes import UNKNOWN
from tests.backends.rollouts import gradients, group_samples, make_trainer, relative_gap
from tests.tiny import tiny_model_dir

EXPERTS, TOP_K, LAYERS = 6, 2, 3
SIZES = {
    "num_hidden_layers": LAYERS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
}
GLM = {
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = {
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": EXPERTS},
    "olmoe": {"num_experts": EXPERTS},
    "glm4_moe": GLM,
}
REPLAY = AlgorithmConfig(use_rollout_routing_replay=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    return {arch: tiny_model_dir(root / arch, arch=arch, **SIZES, **more) for arch, more in MODELS.items()}


def own_routes(trainer, sample):
    """The experts that the model chooses by itself, all layers, from a plain forward."""
    module = trainer._model.module
    module.set_attn_implementation("sdpa")
    with torch.no_grad(), ExpertChoice(EXPERTS, TOP_K) as watched:
        module(input_ids=torch.tensor([sample.tokens[:-1]]), use_cache=False)
    module.set_attn_implementation("slime_forest")
    routes = np.zeros((len(sample.tokens) - 1, LAYERS, TOP_K), np.int32)
    for layer, chosen in zip(range(LAYERS - len(watched.chosen), LAYERS), watched.chosen, strict=True):
        routes[:, layer] = chosen.numpy()
    return routes


def other_routes(sample, seed):
    rng = np.random.default_rng(seed)
    size = len(sample.tokens) - 1
    draws = [[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(size)]
    return np.array(draws, dtype=np.int32)


def with_routes(trainer, samples):
    return [replace(sample, routed_experts=own_routes(trainer, sample)) for sample in samples]


def rows_of(samples):
    return [
        StepRow(sample=s, advantages=tuple(0.5 - 0.1 * k for k in range(s.response_length)), weight=0.2)
        for s in samples
    ]


@pytest.mark.parametrize("arch", MODELS)
def test_the_models_own_routes_change_no_bit(folders, arch):
    trainer, samples = make_trainer(folders[arch], algorithm=REPLAY), group_samples()
    replayed = with_routes(trainer, samples)
    assert trainer.log_probs(replayed) == trainer.log_probs(samples)
    found = []
    for rows in (samples, replayed):
        trainer._optimizer.zero_grad()
        trainer._backward(rows_of(rows))
        found.append(gradients(trainer))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def forced(module, routes):
    """A plain forward of a Qwen3-MoE model whose routers are given `routes`, written out by hand."""
    handles = []
    for index, layer in enumerate(module.model.layers):
        chosen = torch.from_numpy(routes[:, index]).long()

        def route(gate, inputs, _, chosen=chosen):
            logits = inputs[0] @ gate.weight.T
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        handles.append(layer.mlp.gate.register_forward_hook(route))
    return handles


def test_other_routes_give_the_log_probs_of_a_forward_that_is_forced_to_them(folders):
    trainer = make_trainer(folders["qwen3_moe"], algorithm=REPLAY, temperature=1.0)
    samples = [replace(s, routed_experts=other_routes(s, s.index)) for s in group_samples()]
    found = trainer.log_probs(samples)
    module = trainer._model.module
    assert found != trainer.log_probs([replace(s, routed_experts=None) for s in samples])
    module.set_attn_implementation("sdpa")
    for sample, values in zip(samples, found, strict=True):
        handles = forced(module, sample.routed_experts)
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([sample.tokens[:-1]]), use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        targets = torch.tensor(sample.tokens[1:])
        wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0][-sample.response_length :]
        assert values == pytest.approx(wanted.tolist(), abs=2e-6)


def test_gradients_reach_the_router_through_the_experts_that_are_replayed(folders):
    trainer = make_trainer(folders["qwen3_moe"], algorithm=REPLAY)
    samples = group_samples(1, 2)
    routes = [np.tile(np.array([1, 4], np.int32), (len(s.tokens) - 1, LAYERS, 1)) for s in samples]
    trainer._backward(rows_of([replace(s, routed_experts=r) for s, r in zip(samples, routes, strict=True)]))
    found = gradients(trainer)
    used = found["model.layers.1.mlp.experts.down_proj"].abs().sum((1, 2)) > 0
    assert used.nonzero().flatten().tolist() == [1, 4]
    gate = found["model.layers.1.mlp.gate.weight"].abs().sum(1)
    assert bool((gate[[1, 4]] > 0).all())


@pytest.mark.parametrize("trees", ["on", "off"])
def test_prefixes_with_other_routes_are_not_computed_once(folders, trees):
    """Law 3: whether prefixes are shared changes no gradient, also where their routes differ."""
    plain = make_trainer(folders["qwen3_moe"], algorithm=REPLAY, tree_batches="off")
    other = make_trainer(folders["qwen3_moe"], algorithm=REPLAY, tree_batches=trees, micro_batch_size=3)
    rows = rows_of(with_routes(plain, group_samples()))
    changed = rows[0].sample.routed_experts.copy()
    changed[2] = (changed[2] + 1) % EXPERTS
    rows[0] = replace(rows[0], sample=replace(rows[0].sample, routed_experts=changed))
    for trainer in (plain, other):
        trainer._backward(rows)
    assert relative_gap(gradients(other), gradients(plain)) < 1e-5


def test_layers_that_are_computed_again_take_the_same_experts(folders):
    plain = make_trainer(folders["glm4_moe"], algorithm=REPLAY)
    again = make_trainer(folders["glm4_moe"], algorithm=REPLAY, gradient_checkpointing=True)
    rows = rows_of([replace(s, routed_experts=other_routes(s, s.index)) for s in group_samples()])
    for trainer in (plain, again):
        trainer._backward(rows)
    found, wanted = gradients(again), gradients(plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_where_a_route_is_not_known_the_router_chooses(folders):
    trainer, samples = make_trainer(folders["qwen3_moe"], algorithm=REPLAY), group_samples()
    nothing = [replace(s, routed_experts=np.full_like(other_routes(s, 0), UNKNOWN)) for s in samples]
    assert trainer.log_probs(nothing) == trainer.log_probs(samples)


def test_the_reference_model_chooses_by_itself(folders):
    algorithm = replace(REPLAY, use_kl_loss=True, kl_loss_coef=0.1)
    trainer, samples = make_trainer(folders["qwen3_moe"], algorithm=algorithm), group_samples()
    others = [replace(s, routed_experts=other_routes(s, 1)) for s in samples]
    assert trainer.log_probs(others, reference=True) == trainer.log_probs(samples, reference=True)
    assert trainer.log_probs(others) != trainer.log_probs(samples)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(EXPERTS, f"names expert {EXPERTS}, the model has {EXPERTS}"), (0, "names expert 0 twice")],
)
def test_routes_that_no_router_chose_are_refused_by_name(folders, wrong, message):
    trainer, sample = make_trainer(folders["qwen3_moe"], algorithm=REPLAY), group_samples()[1]
    routes = np.full_like(other_routes(sample, 0), wrong)
    with pytest.raises(DataError, match=f"sample 1, layer 0: routed_experts {message}"):
        trainer.log_probs([replace(sample, routed_experts=routes)])


def test_a_model_without_experts_is_refused(tmp_path):
    folder = tiny_model_dir(tmp_path / "dense")
    with pytest.raises(
        ModelError, match=r"has no layers of experts(.|\n)*leave --use-rollout-routing-replay out"
    ):
        make_trainer(folder, algorithm=REPLAY)
