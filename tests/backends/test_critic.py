"""The critic: its values and its gradient on a real model, however rollouts are cut and packed."""

import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModel, AutoModelForTokenClassification

from slime.backends.base import Critic, ValueRow
from slime.backends.critic_update import CriticTraining
from slime.backends.hooks import TrainHooks
from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import CheckpointError, ConfigError, DataError, HookError, ModelError
from slime.utils.user_function import UserFunction
from tests.backends.critics import make_critic, set_head, weights_of
from tests.backends.rollouts import cut, gradients, group_samples, make_trainer, relative_gap
from tests.tiny import tiny_model_dir

PPO = AlgorithmConfig(
    advantage_estimator="ppo", gamma=0.97, lambd=0.9, kl_coef=0.1, normalize_advantages=True
)


class Keeper:
    """A critic that keeps its gradients, and what it was asked, for the test to look at."""

    def __init__(self, critic):
        self.critic, self.rows, self.grads = critic, [], []
        self.values = critic.values

    def step(self, rows):
        metrics = self.critic.step(rows)
        self.rows.append(rows)
        self.grads.append(gradients(self.critic))
        return metrics

    def sleep(self):
        self.critic.sleep()


def train(folder, samples, algorithm=PPO, *, size=100, epochs=1, alone=False, value_clip=0.2, **settings):
    """One update; returns actor, what the critic did, and the update."""
    settings = {"micro_batch_size": 64} | settings
    trainer = make_trainer(folder, algorithm=algorithm, **settings)
    keeper = Keeper(make_critic(folder, value_clip=value_clip, **settings))
    update = train_on_rollouts(
        trainer,
        samples,
        algorithm=algorithm,
        rollouts_per_step=size,
        critic=CriticTraining(critic=keeper, epochs=epochs, alone=alone),
    )
    return trainer, keeper, update


@pytest.fixture(scope="module")
def reference(tiny_dir):
    trainer, keeper, update = train(tiny_dir, group_samples(), tree_batches="off", micro_batch_size=1)
    return gradients(trainer), keeper.grads[0], update


def test_values_are_those_of_a_plain_forward_of_the_states_before_the_tokens(tiny_dir):
    critic: Critic = make_critic(tiny_dir, micro_batch_size=4)
    body = AutoModel.from_pretrained(tiny_dir, dtype=torch.float32)
    head = {name: p for name, p in critic.named_parameters() if name.startswith("score.")}
    samples = group_samples()
    for sample, found in zip(samples, critic.values(samples), strict=True):
        with torch.no_grad():
            states = body(torch.tensor([sample.tokens])).last_hidden_state[0]
        values = (states @ head["score.weight"][0] + head["score.bias"])[sample.prompt_length - 1 : -1]
        expected = [v if flag else 0.0 for v, flag in zip(values.tolist(), sample.loss_mask, strict=True)]
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4},
        {"tree_batches": "off"},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 24},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 10_000},
    ],
    ids=str,
)
def test_law_3_packing_and_prefix_sharing_change_nothing(tiny_dir, reference, settings):
    trainer, keeper, update = train(tiny_dir, group_samples(), **settings)
    assert relative_gap(keeper.grads[0], reference[1]) < 1e-5
    assert relative_gap(gradients(trainer), reference[0]) < 1e-5
    assert update.metrics()["train/critic-value_loss"] == pytest.approx(
        reference[2].metrics()["train/critic-value_loss"], rel=1e-5
    )


@pytest.mark.parametrize("aggregation", ["rollout", "token", "prompt"])
@pytest.mark.parametrize("pieces", [2, 5])
def test_law_3_cutting_and_permuting_change_nothing(tiny_dir, pieces, aggregation):
    algorithm = replace(PPO, loss_aggregation=aggregation)
    samples = group_samples()
    rows = [row for i, sample in enumerate(samples) for row in cut(sample, pieces, 100 * i)]
    random.Random(pieces).shuffle(rows)
    actor, whole, update = train(tiny_dir, samples, algorithm)
    other, parts, cut_update = train(tiny_dir, rows, algorithm, micro_batch_size=2)
    assert relative_gap(parts.grads[0], whole.grads[0]) < 1e-5
    assert relative_gap(gradients(other), gradients(actor)) < 1e-5
    for name in ("values", "returns", "explained_variance"):
        assert cut_update.rollout[name] == pytest.approx(update.rollout[name], rel=1e-5, abs=1e-6)


def test_the_reward_reaches_every_token_of_a_rollout_through_all_of_its_samples(tiny_dir):
    algorithm = AlgorithmConfig(advantage_estimator="ppo")
    samples = [row for i, sample in enumerate(group_samples()) for row in cut(sample, 3, 100 * i)]
    _, keeper, _ = train(tiny_dir, samples, algorithm)
    for row in keeper.rows[0]:
        trained = [r for r, flag in zip(row.returns, row.sample.loss_mask, strict=True) if flag]
        assert trained == pytest.approx([row.sample.reward] * len(trained), abs=1e-6)


def test_law_4_rows_without_vote_change_nothing(tiny_dir, reference):
    samples = group_samples()
    failed = replace(samples[0], index=90, rollout_id=90, reward=math.nan, votes=False)
    _, keeper, _ = train(tiny_dir, [failed, *samples])
    assert relative_gap(keeper.grads[0], reference[1]) < 1e-5


def test_known_answer_of_the_value_loss_on_a_plain_forward(tiny_dir):
    samples = group_samples()
    critic = make_critic(tiny_dir, value_clip=0.05, micro_batch_size=64)
    rng = random.Random(0)
    rows = [
        ValueRow(
            sample=sample,
            returns=tuple(rng.random() for _ in sample.loss_mask),
            old_values=tuple(rng.random() for _ in sample.loss_mask),
            weight=0.1,
        )
        for sample in samples
    ]
    model = AutoModelForTokenClassification.from_pretrained(tiny_dir, num_labels=1, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dict(critic.named_parameters())[name])
    total = torch.zeros(())
    for row in rows:
        start = row.sample.prompt_length - 1
        values = model(torch.tensor([row.sample.tokens])).logits[0, start:-1, 0]
        old, returns = torch.tensor(row.old_values), torch.tensor(row.returns)
        clipped = old + (values - old).clamp(-0.05, 0.05)
        loss = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
        total = total + 0.1 * (loss * torch.tensor(row.sample.loss_mask)).sum()
    total.backward()
    metrics = critic.step(rows)
    assert metrics["value_loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["value_clipfrac"] > 0
    assert relative_gap(gradients(critic), {n: p.grad for n, p in model.named_parameters()}) < 1e-5


def test_clipping_stops_a_value_that_has_moved_far_enough_towards_its_return(tiny_dir):
    sample = group_samples()[0]
    critic = make_critic(tiny_dir, value_clip=0.1)
    values = critic.values([sample])[0]
    ones = [1.0] * sample.response_length
    before = tuple(v - 0.2 for v in values)
    for target, moves in ((1.0, False), (-1.0, True)):
        row = ValueRow(
            sample=sample,
            returns=tuple(v + target for v in values),
            old_values=before,
            weight=1 / sum(ones),
        )
        copy = make_critic(tiny_dir, value_clip=0.1)
        assert (copy.step([row])["grad_norm"] > 0) == moves


def test_steps_and_passes_share_members_weights_and_old_values(tiny_dir):
    _, keeper, update = train(tiny_dir, group_samples(), size=2, epochs=2)
    assert len(update.steps) == 3 and len(update.critic_steps) == 6
    members = [[row.sample.rollout_id for row in rows] for rows in keeper.rows]
    assert members[:3] == members[3:] == [[0, 1], [2, 3], [4, 5]]
    first, second = keeper.rows[0], keeper.rows[3]
    assert [(r.old_values, r.returns, r.weight) for r in first] == [
        (r.old_values, r.returns, r.weight) for r in second
    ]
    assert sum(row.weight * row.sample.trained_tokens for row in first) == pytest.approx(1.0)


def test_warm_up_trains_the_critic_and_leaves_the_actor_untouched(tiny_dir):
    before = weights_of(make_trainer(tiny_dir, algorithm=PPO))
    critic_before = weights_of(make_critic(tiny_dir))
    trainer, keeper, update = train(tiny_dir, group_samples(), alone=True)
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(value, critic_before[n]) for n, value in weights_of(keeper.critic).items())
    metrics = update.metrics()
    assert "train/loss" not in metrics and metrics["train/critic-value_loss"] > 0


def test_the_critic_learns_its_returns_and_its_gradients_are_given_up(tiny_dir):
    algorithm = AlgorithmConfig(advantage_estimator="ppo")
    critic = make_critic(tiny_dir, seed=None, lr=3e-3)
    trainer = make_trainer(tiny_dir, lr=1e-9)
    updates = [
        train_on_rollouts(
            trainer,
            group_samples(),
            algorithm=algorithm,
            rollouts_per_step=2,
            critic=CriticTraining(critic=critic, epochs=4),
        )
        for _ in range(12)
    ]
    assert updates[0].rollout["values"] == 0.0
    assert updates[0].rollout["explained_variance"] == pytest.approx(0.0)
    assert updates[-1].rollout["explained_variance"] > 0.5
    assert all(parameter.grad is None for _, parameter in critic.named_parameters())


def test_own_flags_win_over_the_actors(tiny_dir):
    critic = make_critic(tiny_dir, critic={"lr": 0.5, "lr_warmup_iters": 2}, lr=1e-6)
    row = ValueRow(sample=group_samples()[0], returns=(1.0,) * 9, old_values=(0.0,) * 9, weight=0.1)
    row = replace(
        row,
        returns=row.returns[: row.sample.response_length],
        old_values=row.old_values[: row.sample.response_length],
    )
    assert [critic.step([row])["lr"] for _ in range(3)] == [0.25, 0.5, 0.5]


def test_resume_is_exact(tiny_dir, tmp_path):
    def steps(critic, seeds):
        for seed in seeds:
            samples = group_samples(seed=seed)
            values = critic.values(samples)
            rows = [
                ValueRow(
                    sample=sample,
                    returns=(sample.reward,) * sample.response_length,
                    old_values=tuple(old),
                    weight=0.02,
                )
                for sample, old in zip(samples, values, strict=True)
            ]
            critic.step(rows)

    schedule = {"lr_decay_style": "cosine", "lr_warmup_iters": 1, "clip_grad": 0.5}
    straight = make_critic(tiny_dir, **schedule)
    steps(straight, range(4))
    first = make_critic(tiny_dir, **schedule)
    steps(first, range(2))
    first.save(tmp_path / "critic")
    second = make_critic(tiny_dir, seed=None, **schedule)
    second.load(tmp_path / "critic")
    steps(second, range(2, 4))
    expected, found = weights_of(straight), weights_of(second)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_export_is_a_token_classifier_and_another_critic_starts_from_it(tiny_dir, tmp_path):
    critic = make_critic(tiny_dir)
    samples = group_samples()
    critic.save_hf(tmp_path / "values")
    again = make_critic(tiny_dir, seed=None, critic={"load": str(tmp_path / "values")})
    assert again.values(samples) == critic.values(samples)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "values").eval()
    with torch.no_grad():
        logits = model(torch.tensor([samples[0].tokens])).logits
    found = logits[0, samples[0].prompt_length - 1 : -1, 0].tolist()
    expected = critic.values(samples[:1])[0]
    kept = [(a, b) for a, b, flag in zip(found, expected, samples[0].loss_mask, strict=True) if flag]
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in kept)


def test_a_causal_model_gives_values_of_zero(tiny_dir):
    critic = make_critic(tiny_dir, seed=None)
    assert {value for row in critic.values(group_samples()) for value in row} == {0.0}
    set_head(critic, 3)
    assert any(value for row in critic.values(group_samples()) for value in row)


@pytest.mark.parametrize("arch", ["qwen2", "gemma3_text", "mistral"])
def test_other_architectures_have_values_that_packing_does_not_change(tmp_path, arch):
    folder = tiny_model_dir(tmp_path / arch, arch=arch)
    packed = make_critic(folder, micro_batch_size=64).values(group_samples())
    alone = make_critic(folder, micro_batch_size=1, tree_batches="off").values(group_samples())
    for left, right in zip(packed, alone, strict=True):
        assert left == pytest.approx(right, abs=1e-5)


def test_bfloat16_trains(tiny_dir):
    critic = make_critic(tiny_dir, train_precision="bfloat16")
    sample = group_samples()[0]
    size = sample.response_length
    metrics = critic.step(
        [ValueRow(sample=sample, returns=(1.0,) * size, old_values=(0.0,) * size, weight=0.1)]
    )
    assert metrics["grad_norm"] > 0


def test_what_does_not_fit_is_an_error_that_names_it(tiny_dir, tmp_path):
    critic = make_critic(tiny_dir)
    sample = group_samples()[4]
    size = sample.response_length
    row = ValueRow(sample=sample, returns=(1.0,) * size, old_values=(0.0,) * size, weight=1.0)
    for bad, message in [
        (replace(row, returns=(1.0,)), "returns has length 1"),
        (replace(row, old_values=(1.0, 2.0)), "old_values has length 2"),
        (replace(row, returns=(math.inf,) * size), "returns is not finite"),
        (replace(row, weight=math.nan), "weight is not finite"),
        (replace(row, sample=replace(sample, tokens=sample.tokens[-size:])), "no token before"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            critic.step([bad])
        assert "sample 4" in str(caught.value)
    with pytest.raises(DataError, match="no token before"):
        critic.values([replace(sample, tokens=sample.tokens[-size:])])
    small = tiny_model_dir(tmp_path / "small", vocab_size=100)
    with pytest.raises(ModelError, match="knows 100 tokens, the actor's tokenizer has 259"):
        make_critic(tiny_dir, critic={"load": str(small)})
    make_trainer(tiny_dir).save(tmp_path / "actor")
    with pytest.raises(CheckpointError, match="of another model"):
        critic.load(tmp_path / "actor")
    with pytest.raises(ModelError, match="no such model folder"):
        make_critic(tiny_dir, critic={"load": str(tmp_path / "nowhere")})
    classifier = AutoModelForTokenClassification.from_pretrained(tiny_dir, num_labels=3)
    classifier.save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match=r"score.weight is \(3, 64\)"):
        make_critic(tiny_dir, critic={"load": str(tmp_path / "three")})
    with pytest.raises(ConfigError, match="budget"):
        make_critic(tiny_dir, use_dynamic_batch_size=True)


def test_a_custom_advantage_function_without_returns_leaves_nothing_to_learn(tiny_dir):
    def advantages(args, data):
        data["advantages"] = [torch.zeros(length) for length in data["response_lengths"]]

    trainer, critic = make_trainer(tiny_dir), make_critic(tiny_dir)
    with pytest.raises(HookError, match="did not set rollout_data"):
        train_on_rollouts(
            trainer,
            group_samples(),
            algorithm=AlgorithmConfig(advantage_estimator="ppo"),
            rollouts_per_step=6,
            hooks=TrainHooks(advantages=UserFunction("--custom-advantage-function-path", advantages)),
            critic=CriticTraining(critic=critic),
        )


def test_checkpointed_layers_give_the_same_gradient(tiny_dir, reference):
    _, keeper, _ = train(tiny_dir, group_samples(), gradient_checkpointing=True)
    assert relative_gap(keeper.grads[0], reference[1]) < 1e-5
