"""Configuration: flags in, one frozen `Config` out.

Public: `Config`, `load_config`. Sections are what our own code receives; `Config.args` is what hooks get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slime.config.args_view import ArgsView
from slime.config.engine_choice import foreign_flags
from slime.config.parse import all_flags, parse_values
from slime.config.plan import Plan, make_plan
from slime.config.problem import Check, Problem
from slime.config.roles import apply_roles
from slime.config.sections import (
    SECTIONS,
    DataConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from slime.config.serving_sections import ServingConfig, WeightsConfig
from slime.config.training_sections import AlgorithmConfig, CriticConfig, TrainConfig
from slime.config.validate import validate
from slime.errors import ConfigError

__all__ = ["FULLY_ASYNC", "Config", "load_config"]
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections, the user's own keys, and the warnings of validation.

    Attributes:
        sglang: flags of SGLang's engine that the user gave, by SGLang's own names.
        router: the same of its router.
        foreign_args: what `args` has of those programs, by dest, defaults filled in.
    """

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    evaluation: EvalConfig
    algorithm: AlgorithmConfig
    train: TrainConfig
    critic: CriticConfig
    engine: EngineConfig
    serving: ServingConfig
    weights: WeightsConfig
    run: RunConfig
    sglang: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    foreign_args: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()

    @property
    def train_only(self) -> bool:
        """Whether there is no engine: rollouts come from files, or from conversations, none evaluated."""
        learns_only = self.learns_from_data and not self.evaluates
        return self.run.debug_train_only or self.reads_dumps or learns_only

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation data sets."""
        return bool(self.evaluation.eval_prompt_data or self.evaluation.eval_config)

    @property
    def reads_dumps(self) -> bool:
        """Whether rollouts come from files."""
        return self.run.load_debug_rollout_data is not None

    @property
    def is_fully_async(self) -> bool:
        """Whether rollouts go on over steps and weight updates."""
        return self.rollout.rollout_function_path == FULLY_ASYNC

    @property
    def overlaps(self) -> bool:
        """Whether rollouts are made while the trainer trains."""
        return (self.rollout.async_training or self.is_fully_async) and not self.train_only

    @property
    def keeps_rollouts(self) -> bool:
        """Whether some of what trains may have been sampled before the last weight update."""
        surplus = (self.rollout.over_sampling_batch_size or 0) > (self.data.rollout_batch_size or 0)
        return not self.train_only and (self.overlaps or self.rollout.partial_rollout or surplus)

    @property
    def learns_from_data(self) -> bool:
        """Whether this is supervised fine-tuning."""
        return self.algorithm.loss_type == "sft_loss"

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the actor."""
        algorithm = self.algorithm
        has_returns = algorithm.compute_advantages_and_returns and not self.learns_from_data
        return algorithm.advantage_estimator == "ppo" and has_returns

    def plan(self, prompts_in_data: int | None, first_rollout_step: int = 0) -> Plan:
        """The derived quantities; see `make_plan`."""
        return make_plan(
            self.data,
            self.rollout,
            self.evaluation,
            prompts_in_data,
            first_rollout_step,
            critic_epochs=self.critic.num_epochs if self.has_critic else 0,
            critic_only_rollout_steps=self.algorithm.num_critic_only_steps if self.has_critic else 0,
        )

    def flags(self) -> dict[str, Any]:
        """Flags that differ from their default, by name: a ``--config`` file that says this configuration."""
        args = self.args()
        values = {row.name: (getattr(args, row.dest), row) for row in all_flags()}
        own = {
            name: not value if row.negated else value
            for name, (value, row) in values.items()
            if value != row.default
        }
        return own | {
            f"{program}-{name.replace('_', '-')}": value
            for program, given in (("sglang", self.sglang), ("router", self.router))
            for name, value in given.items()
        }

    def args(self, **derived: Any) -> ArgsView:
        """The view that hooks get: every flag by dest, `derived` values, and the user's keys."""
        values: dict[str, Any] = {}
        for name, (_, prefix) in SECTIONS.items():
            section = getattr(self, name)
            for item in dataclasses.fields(section):
                values[prefix.replace("-", "_") + item.name] = getattr(section, item.name)
        values["over_sampling_batch_size"] = (
            self.rollout.over_sampling_batch_size or self.data.rollout_batch_size
        )
        return ArgsView(dict(self.foreign_args) | values | derived, self.user)


def load_config(argv: list[str], prog: str = "slime train", checks: Sequence[Check] | None = None) -> Config:
    """Parse, type and validate a command line (with its ``--config`` file).

    Args:
        checks: of validate.py; by default all that a run needs.

    Raises:
        ConfigError: anything that cannot run; see parse.py and validate.py.
    """
    flags = all_flags()
    foreign = foreign_flags(argv, flags)
    flags += foreign.usable()
    parsed = parse_values(argv, flags, prog, foreign.refusals())
    values, given = apply_roles(parsed.values, parsed.given, {row.dest: row for row in flags})
    values["rollout_engine"] = foreign.engine
    sections = {name: _build(cls, prefix, values) for name, (cls, prefix) in SECTIONS.items()}
    config = Config(
        **sections,
        sglang=foreign.said("sglang", values, parsed.said),
        router=foreign.said("router", values, parsed.said),
        foreign_args={row.dest: values[row.dest] for row in foreign.usable()},
        user=_user_keys(values["custom_config_path"], values),
    )
    return dataclasses.replace(config, warnings=tuple(validate(config, given, checks)))


def _build(section: Callable[..., Any], prefix: str, values: Mapping[str, Any]) -> Any:
    start = prefix.replace("-", "_")
    names = [item.name for item in dataclasses.fields(section)]  # type: ignore[arg-type]
    return section(**{name: values[start + name] for name in names})


def _user_keys(path: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of ``--custom-config-path``: keys of the user's own, never flags."""
    if path is None:
        return {}
    try:
        keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}", place="--custom-config-path") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{path} must be a mapping", place="--custom-config-path")
    clash = sorted(key for key in keys if key in values)
    if clash:
        raise ConfigError(
            f"{path} sets flags: {', '.join(clash)}",
            place="--custom-config-path",
            remedy="set flags on the command line or in --config; keep only your own keys here",
        )
    return keys
