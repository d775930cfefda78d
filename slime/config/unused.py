"""Flags that would have no effect: each is refused with what it needs.

One table a section: the dest, whether the configuration uses it, and what it would need. A flag counts only
if the user set it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from slime.config.device_sharing import OFFLOADS
from slime.config.problem import Problem, dashed
from slime.config.sections import EvalConfig, RewardConfig
from slime.config.training_sections import AlgorithmConfig, CriticConfig
from slime.config.weight_movement import unused_by_weights

if TYPE_CHECKING:
    from slime.config import Config

Rule: TypeAlias = tuple[str, object, str]
"""Dest, whether it is used, what it needs."""
_EVAL_FLAGS = tuple(
    item.name
    for item in dataclasses.fields(EvalConfig)
    if item.name not in ("eval_prompt_data", "eval_config")
)
_JUDGE_FLAGS = tuple(item.name for item in dataclasses.fields(RewardConfig) if item.name.startswith("judge_"))
PASS_RATE_FILTER = "slime.rollout.filter_hub.pass_rate.check_pass_rate"
CURRICULUM = "slime.rollout.curriculum.CurriculumDataSource"
_WITHOUT_GROUPS = ("reinforce_plus_plus", "ppo")
_HEALTH_FLAGS = (
    "rollout_health_check_interval",
    "rollout_health_check_timeout",
    "rollout_health_check_first_wait",
    "rollout_engine_restarts",
)
_ROUTER_FLAGS = ("sglang_router_ip", "sglang_router_port")
_CRITIC_FLAGS = (
    "lambd",
    "value_clip",
    "num_critic_only_steps",
    *(f"critic_{item.name}" for item in dataclasses.fields(CriticConfig)),
)
_POLICY_FLAGS = tuple(
    item.name
    for item in dataclasses.fields(AlgorithmConfig)
    if item.name
    not in (
        "loss_type",
        "compute_advantages_and_returns",
        "loss_mask_type",
        "custom_convert_samples_to_train_data_path",
        "loss_aggregation",
        "loss_aggregation_tokens",
        "calculate_per_token_loss",
        "entropy_coef",
    )
)


def unused(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    """Those of the flags in `given` that nothing would read."""
    tables = (
        _rewards,
        _estimators,
        _losses,
        _corrections,
        _batches,
        _scheduling,
        _devices,
        _training,
        _saving,
        _data,
        _evaluation,
        _engines,
        unused_by_weights,
        _routers,
    )
    for table in tables:
        for dest, used, needs in table(config):
            if dest in given and not used:
                yield Problem(dashed(dest), f"has no effect without {needs}", "leave it out, or set both")


def _all_need(dests: Iterable[str], used: object, needs: str) -> list[Rule]:
    return [(dest, used, needs) for dest in dests]


def _rewards(config: Config) -> list[Rule]:
    algorithm, reward = config.algorithm, config.reward
    is_rloo = algorithm.advantage_estimator == "rloo"
    hooks = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    own = not algorithm.gives_final_rewards
    return [
        ("rewards_normalization", takes_groups(algorithm) and not is_rloo, "an estimator with this choice"),
        *_all_need(
            ("rewards_normalization", "grpo_std_normalization"), own, "slime's own normalisation of rewards"
        ),
        ("grpo_std_normalization", algorithm.rewards_normalization, "reward normalisation"),
        *_all_need(
            hooks, not is_rloo, "an estimator that takes rewards as they are (no --advantage-estimator rloo)"
        ),
        ("rm_type", reward.custom_rm_path is None, "the built-in rewards (no --custom-rm-path)"),
        (
            "rm_url",
            algorithm.use_opd or "remote_rm" in (reward.rm_type or "remote_rm"),
            "--rm-type remote_rm or --use-opd",
        ),
        *_all_need(
            _JUDGE_FLAGS,
            "judge" in (reward.rm_type or "judge") or config.evaluation.eval_config,
            "--rm-type judge",
        ),
    ]


def _estimators(config: Config) -> list[Rule]:
    algorithm = config.algorithm
    is_custom = algorithm.loss_type == "custom_loss"
    return [
        ("gamma", not takes_groups(algorithm), "--advantage-estimator reinforce_plus_plus or ppo"),
        *_all_need(_CRITIC_FLAGS, config.has_critic, "--advantage-estimator ppo"),
        *_all_need(("opd_type", "opd_kl_coef"), algorithm.use_opd, "--use-opd"),
        (
            "compute_advantages_and_returns",
            config.learns_from_data or is_custom,
            "--loss-type sft_loss or custom_loss",
        ),
    ]


def _losses(config: Config) -> list[Rule]:
    algorithm = config.algorithm
    is_custom = algorithm.loss_type == "custom_loss"
    in_loss, anywhere = algorithm.use_kl_loss, algorithm.use_kl_loss or algorithm.kl_coef
    return [
        *_all_need(("kl_loss_coef", "use_unbiased_kl"), in_loss, "--use-kl-loss"),
        *_all_need(("kl_loss_type", "ref_load"), anywhere, "--use-kl-loss or --kl-coef"),
        ("opsm_delta", algorithm.use_opsm, "--use-opsm"),
        (
            "loss_aggregation_tokens",
            algorithm.loss_aggregation == "constant",
            "--loss-aggregation constant",
        ),
        ("custom_loss_function_path", is_custom, "--loss-type custom_loss"),
        *_all_need(
            ("use_tis", "use_rs", "use_opsm", "custom_pg_loss_reducer_function_path"),
            not is_custom,
            "slime's own policy loss (no --loss-type custom_loss)",
        ),
        *_all_need(_POLICY_FLAGS, not config.learns_from_data, "a policy loss (no --loss-type sft_loss)"),
    ]


def _corrections(config: Config) -> list[Rule]:
    algorithm = config.algorithm
    return [
        *_all_need(
            ("tis_clip", "tis_clip_low", "custom_tis_function_path", "use_decoupled_loss"),
            algorithm.use_tis,
            "--use-tis",
        ),
        *_all_need(
            ("tis_mode", "tis_level", "tis_batch_normalize"),
            algorithm.use_tis and not algorithm.custom_tis_function_path,
            "--use-tis, and without --custom-tis-function-path",
        ),
        *_all_need(
            ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
            algorithm.use_rs,
            "--use-rs",
        ),
    ]


def _batches(config: Config) -> list[Rule]:
    train = config.train
    deterministic = train.deterministic_mode or config.engine.enable_deterministic_inference
    return [
        ("max_tokens_per_gpu", train.use_dynamic_batch_size, "--use-dynamic-batch-size"),
        (
            "micro_batch_size",
            not train.use_dynamic_batch_size,
            "a static batch (no --use-dynamic-batch-size)",
        ),
        *_all_need(
            ("balance_data", "balance_by_flops", "distributed_timeout_minutes"),
            train.actor_num_gpus_per_node > 1,
            "--actor-num-gpus-per-node 2 or more",
        ),
        (
            "engine_max_running_requests",
            not deterministic,
            "answers in parallel (no --deterministic-mode, no --engine-enable-deterministic-inference)",
        ),
    ]


def _scheduling(config: Config) -> list[Rule]:
    rollout, is_async = config.rollout, config.is_fully_async
    wants_fresh = config.train.deterministic_mode
    return [
        ("partial_rollout", not is_async, "steps that interrupt rollouts (not with fully_async_rollout)"),
        ("partial_rollout", not wants_fresh, "a batch that time decides (no --deterministic-mode)"),
        ("mask_offpolicy_in_partial_rollout", rollout.partial_rollout, "--partial-rollout"),
        ("update_in_flight", is_async, "--rollout-function-path of fully_async_rollout"),
        ("late_percentile", is_async, "--rollout-function-path of fully_async_rollout"),
        *_all_need(
            ("async_training", "max_staleness"),
            not (config.train_only or config.run.debug_rollout_only),
            "both an engine and a trainer",
        ),
    ]


def _devices(config: Config) -> list[Rule]:
    serving = config.serving
    generates, trains = not config.train_only, not config.run.debug_rollout_only
    own = generates and serving.rollout_external_engine_addrs is None
    return [
        *_all_need(("colocate", *OFFLOADS), generates and trains, "both an engine and a trainer"),
        *_all_need(
            ("rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node", "use_fault_tolerance"),
            own,
            "engines of its own (no --rollout-external-engine-addrs, no training from files)",
        ),
        *_all_need(_HEALTH_FLAGS, serving.use_fault_tolerance, "--use-fault-tolerance"),
    ]


def _training(config: Config) -> list[Rule]:
    train = config.train
    decays = train.lr_decay_style != "constant"
    return [
        *_all_need(("min_lr", "critic_min_lr", "lr_decay_iters"), decays, "--lr-decay-style cosine"),
        *_all_need(("lora_alpha", "lora_target_modules"), train.lora_rank, "--lora-rank"),
    ]


def _saving(config: Config) -> list[Rule]:
    model, run = config.model, config.run
    return [
        *_all_need(
            ("save", "save_hf", "critic_save"),
            not run.debug_rollout_only,
            "a trainer (no --debug-rollout-only)",
        ),
        ("save_interval", bool(model.save or model.save_hf or config.critic.save), "--save"),
        ("keep_checkpoints", model.save is not None, "--save"),
        ("no_save_optim", model.save or model.load, "--save or --load"),
        *_all_need(("tb_project_name", "tb_experiment_name"), run.use_tensorboard, "--use-tensorboard"),
    ]


def _data(config: Config) -> list[Rule]:
    data = config.data
    return [
        (
            "prompt_data",
            data.rollout_global_dataset,
            "the data set (no --disable-rollout-global-dataset)",
        ),
        ("prompt_data_weights", isinstance(data.prompt_data, list), "several files in --prompt-data"),
        *_all_need(
            ("pass_rate_low", "pass_rate_high"),
            _uses_pass_rates(config),
            f"--dynamic-sampling-filter-path {PASS_RATE_FILTER} or --data-source-path {CURRICULUM}",
        ),
        *_all_need(
            ("pass_rate_window", "curriculum_floor"),
            data.data_source_path == CURRICULUM,
            f"--data-source-path {CURRICULUM}",
        ),
        (
            "pass_threshold",
            config.evaluates or _uses_pass_rates(config),
            "an evaluation, the pass-rate filter or the curriculum",
        ),
        ("label_key", data.prompt_data is not None or config.train_only, "--prompt-data"),
        ("apply_chat_template", not config.learns_from_data, "rollouts (no --loss-type sft_loss)"),
        (
            "apply_chat_template_kwargs",
            data.apply_chat_template or config.learns_from_data,
            "--apply-chat-template",
        ),
        ("loss_mask_type", config.learns_from_data, "--loss-type sft_loss"),
    ]


def _evaluation(config: Config) -> list[Rule]:
    return [
        *_all_need(
            ("eval_prompt_data", "eval_config"),
            not config.train_only,
            "an engine (no --debug-train-only or --load-debug-rollout-data)",
        ),
        *_all_need(_EVAL_FLAGS, config.evaluates, "--eval-prompt-data or --eval-config"),
    ]


def _engines(config: Config) -> list[Rule]:
    is_sglang = config.serving.rollout_engine == "sglang"
    return _all_need([f"sglang_{field}" for field in config.sglang], is_sglang, "--rollout-engine sglang")


def _routers(config: Config) -> list[Rule]:
    serving = config.serving
    found = serving.sglang_router_ip is not None and serving.sglang_config is None
    own = serving.rollout_external_engine_addrs is None
    flags = [*(f"router_{field}" for field in config.router), "sglang_router_request_timeout_secs"]
    return [
        *_all_need(flags, not found, "a router of its own (no --sglang-router-ip)"),
        *_all_need(
            ("sglang_config", "prefill_num_servers"),
            own,
            "engines of its own (no --rollout-external-engine-addrs)",
        ),
        *_all_need(
            (*flags, *_ROUTER_FLAGS, "sglang_config", "prefill_num_servers", "rollout_external_engine_addrs"),
            not config.train_only,
            "an engine (no --debug-train-only or --load-debug-rollout-data)",
        ),
    ]


def _uses_pass_rates(config: Config) -> bool:
    filters = config.rollout.dynamic_sampling_filter_path == PASS_RATE_FILTER
    return filters or config.data.data_source_path == CURRICULUM


def takes_groups(algorithm: AlgorithmConfig) -> bool:
    """Whether the estimator compares the rollouts of a group."""
    return algorithm.advantage_estimator not in _WITHOUT_GROUPS
