"""Flags by role are flags: typed, closed, and found in the configuration that is written down."""

import pytest
import yaml

from slime.config import load_config
from slime.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    """A function: the configuration of PPO with a roles file of this text, and further words."""
    (tmp_path / "config.json").write_text("{}")

    def run(text, *words):
        (tmp_path / "roles.yaml").write_text(text)
        return load_config(
            [
                *("--hf-checkpoint", str(tmp_path), "--disable-rollout-global-dataset"),
                *("--rollout-batch-size", "8", "--num-rollout", "10", "--rollout-max-response-len", "8"),
                *("--advantage-estimator", "ppo", "--megatron-config-path", str(tmp_path / "roles.yaml")),
                *words,
            ]
        )

    return run


def roles(**overrides):
    entries = [{"name": role, "role": role, "overrides": values} for role, values in overrides.items()]
    return yaml.safe_dump({"megatron": entries})


def learning_rates(config):
    return config.train.lr, config.critic.train_config(config.train).lr


def test_each_role_has_its_own_and_the_command_line_for_the_rest(load):
    config = load(roles(actor={"lr": 2e-6}, critic={"weight-decay": 0.5}), "--lr", "3e-6")
    assert learning_rates(config) == (2e-6, 3e-6)
    own = config.critic.train_config(config.train)
    assert (own.weight_decay, config.train.weight_decay) == (0.5, 0.01)
    config = load(roles(critic={"lr": "1e-5", "num_epochs": 2}))
    assert learning_rates(config) == (1e-6, 1e-5)
    assert config.critic.num_epochs == 2


def test_the_configuration_that_is_written_down_needs_no_file(load, tmp_path):
    config = load(roles(actor={"lr": 2e-6}, critic={"lr": 1e-5}))
    written = tmp_path / "flags.yaml"
    written.write_text(yaml.safe_dump(config.flags()))
    assert learning_rates(load_config(["--config", str(written)])) == (2e-6, 1e-5)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (roles(critic={"lrr": 1}), [], "critic: lrr: is nothing that a critic overrides"),
        (roles(critic={"lr": "fast"}), [], "critic: lr: expects a number"),
        (roles(critic={"lr": 1e-5}), ["--critic-lr", "2e-5"], "drop --critic-lr"),
        (roles(actor={"rollout_batch_size": 4}), [], "is no flag of model or training"),
        (roles(actor={"critic_lr": 4}), [], "is no flag of model or training"),
        (roles(actor={"lr": 0}), [], "cannot learn"),
        ("megatron: 3", [], "a list of roles"),
        ("megatron: []\nsglang: []", [], "a list of roles"),
        ("megatron: [{role: judge}]", [], "an entry needs `role`"),
        ("megatron: [{role: critic, lr: 1}]", [], "an entry needs `role`"),
        ("megatron: [{role: critic}, {role: critic}]", [], "two entries"),
        ("megatron: [{role: critic, overrides: [1]}]", [], "must be one mapping"),
        ("megatron: {", [], "cannot read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(load, text, words, message):
    with pytest.raises(ConfigError) as caught:
        load(text, *words)
    assert message in str(caught.value)


def test_overrides_of_a_critic_that_is_not_there_are_refused(load):
    with pytest.raises(ConfigError, match="--critic-lr: has no effect"):
        load(roles(critic={"lr": 1e-5}), "--advantage-estimator", "grpo", "--n-samples-per-prompt", "4")
