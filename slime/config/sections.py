"""The flag table: every flag that slime has, with type, range, default and meaning, by section.

A section is the typed value that our own code receives; field names are the names on `args`.
A flag stands here only when it works. Knows nothing of parsing, files or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.flags import flag
from slime.config.serving_sections import ServingConfig, WeightsConfig
from slime.config.training_sections import AlgorithmConfig, CriticConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model folder, checkpoints and what is saved when."""

    hf_checkpoint: str | None = flag(None, "Hugging Face model folder: tokenizer, config, weights", "str")
    ref_load: str | None = flag(None, "folder of the reference model (default: --hf-checkpoint)", "str")
    load: str | None = flag(None, "folder to resume from: its newest complete checkpoint", "str")
    save: str | None = flag(None, "folder for checkpoints", "str")
    save_interval: int | None = flag(
        None, "save every N rollouts (default: at the end only)", "int", at_least=1
    )
    keep_checkpoints: int | None = flag(
        None, "complete checkpoints that stay in --save (default: all)", "int", at_least=1
    )
    save_hf: str | None = flag(None, "folder for a Hugging Face export; {rollout_id} is filled in", "str")
    no_save_optim: bool = flag(False, "neither save nor load the optimizer's state", "switch")
    start_rollout_id: int | None = flag(
        None, "first rollout id (default: the checkpoint's + 1)", "int", at_least=0
    )
    seed: int = flag(1234, "seed of the training process", "int", at_least=0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts, and how many of them make a rollout and a step."""

    prompt_data: str | list[str] | None = flag(
        None, "prompt files, .jsonl or .parquet; path@[a:b] takes a slice; several are mixed", "str_or_strs"
    )
    prompt_data_weights: list[float] | None = flag(
        None,
        "share of each prompt file in the mixture (default: by its number of prompts)",
        "floats",
        above=0,
    )
    input_key: str = flag("input", "row key of the prompt", "str")
    label_key: str | None = flag(None, "row key of the label", "str")
    metadata_key: str = flag("metadata", "row key of the metadata", "str")
    tool_key: str = flag("tools", "row key of the tools", "str")
    apply_chat_template: bool = flag(False, "render prompts with the chat template at load", "switch")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "JSON keyword arguments of the template", "json")
    rollout_global_dataset: bool = flag(
        True,
        "no built-in data set; the rollout function makes its own prompts",
        "switch",
        name="disable-rollout-global-dataset",
        negated=True,
    )
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "data source class", "str"
    )
    buffer_filter_path: str | None = flag(None, "function that takes groups out of the buffer", "str")
    pass_rate_low: float = flag(
        0.05,
        "least useful pass rate, for the pass-rate filter and the curriculum",
        "float",
        at_least=0,
        at_most=1,
    )
    pass_rate_high: float = flag(
        0.95, "greatest useful pass rate, for the same", "float", at_least=0, at_most=1
    )
    pass_rate_window: int = flag(
        4, "groups of a prompt whose rollouts make its running pass rate", "int", at_least=1
    )
    curriculum_floor: float = flag(
        0.1,
        "chance that the curriculum takes a prompt whose pass rate is not useful",
        "float",
        above=0,
        at_most=1,
    )
    rollout_shuffle: bool = flag(False, "shuffle the prompts in every epoch", "switch")
    rollout_seed: int = flag(42, "seed of shuffling and of the sampling seeds", "int", at_least=0)
    num_rollout: int | None = flag(None, "number of rollout steps", "int", at_least=0)
    num_epoch: int | None = flag(None, "passes over the data; gives --num-rollout", "int", at_least=1)
    rollout_batch_size: int | None = flag(None, "prompts per rollout step", "int", at_least=1)
    n_samples_per_prompt: int = flag(1, "rollouts per prompt (the size of a group)", "int", at_least=1)
    global_batch_size: int | None = flag(None, "rollouts per optimizer step", "int", at_least=1)
    incomplete_step: str = flag(
        "train",
        "rollouts that fill no optimizer step: train deals all over steps of nearly equal size, each weighed "
        "by its own; carry lets the rest wait for the next rollout step (the last one trains all)",
        "str",
        choices=["train", "carry"],
    )
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps per rollout step; gives --global-batch-size", "int", at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation: sampling, limits, scheduling and the hooks around it."""

    rollout_function_path: str = flag(
        "slime.rollout.sglang_rollout.generate_rollout", "the rollout function", "str"
    )
    custom_generate_function_path: str | None = flag(None, "generate hook, per sample", "str")
    rollout_sample_hook_path: list[str] = flag([], "hook after generation, before reward", "append")
    rollout_temperature: float = flag(
        1.0, "sampling temperature; divides the training logits too", "float", at_least=0
    )
    rollout_top_p: float = flag(1.0, "nucleus sampling mass", "float", above=0, at_most=1)
    rollout_top_k: int = flag(-1, "sample among the k likeliest; -1 is all", "int", at_least=-1)
    rollout_max_context_len: int | None = flag(None, "most tokens of prompt and response", "int", at_least=2)
    rollout_max_prompt_len: int | None = flag(None, "drop longer prompts at load", "int", at_least=1)
    rollout_max_response_len: int | None = flag(None, "most new tokens of a response", "int", at_least=1)
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the text", "switch")
    rollout_stop: list[str] | None = flag(None, "stop strings", "strs")
    rollout_stop_token_ids: list[int] | None = flag(None, "stop token ids", "ints")
    over_sampling_batch_size: int | None = flag(
        None, "prompts in flight while a batch fills (default: --rollout-batch-size)", "int", at_least=1
    )
    dynamic_sampling_filter_path: str | None = flag(None, "keep or drop a finished group", "str")
    rollout_sample_filter_path: str | None = flag(
        None, "mark samples of the full batch out of the loss", "str"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "sees all groups of a rollout, filtered ones too", "str"
    )
    sglang_server_concurrency: int = flag(
        512, "most rollouts in flight for each engine of the default model", "int", at_least=1
    )
    rollout_timeout: float = flag(
        1800.0, "deadline of one rollout, and of a hook that sees groups, in seconds", "float", above=0
    )
    turn_timeout: float | None = flag(
        None, "deadline of one engine call of a rollout in seconds (default: the rollout's)", "float", above=0
    )
    rollout_retries: int = flag(0, "times that a failed rollout begins again", "int", at_least=0)
    partial_rollout: bool = flag(
        False, "continue in the next step what a full batch interrupts, instead of beginning again", "switch"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "leave the tokens before the interruption out of the loss", "switch"
    )
    async_training: bool = flag(
        False,
        "generate the next rollout step while this one trains; implied by fully_async_rollout",
        "switch",
    )
    max_staleness: int | None = flag(
        None,
        "most weight updates between a token and its training (default: 2 for fully_async_rollout, else no "
        "bound)",
        "int",
        at_least=0,
    )
    late_percentile: float | None = flag(
        None,
        "fully asynchronous: cut a group that holds up a batch by its age once it runs longer than this "
        "share of the others; 1 never cuts (default: 0.98)",
        "float",
        above=0,
        at_most=1,
    )
    update_in_flight: str = flag(
        "continue",
        "what fully asynchronous rollouts in flight do when weights change: continue with the new ones, or "
        "wait: the update waits for them",
        "str",
        choices=["continue", "wait"],
    )
    max_failed_rollout_ratio: float = flag(
        0.5, "stop when more than this share of a step's rollouts failed", "float", at_least=0, at_most=1
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Where rewards come from."""

    rm_type: str | None = flag(
        None,
        "built-in reward: math, deepscaler, dapo, f1, gpqa, ifbench, remote_rm, judge, random; or boxed_...",
        "str",
    )
    custom_rm_path: str | None = flag(None, "reward hook", "str")
    group_rm: bool = flag(False, "reward a whole group in one call", "switch")
    rm_url: str | None = flag(None, "URL of the remote reward, or of the teacher's /generate", "str")
    reward_key: str | None = flag(None, "key of the scalar in a reward dict", "str")
    eval_reward_key: str | None = flag(None, "the same in evaluation", "str")
    pass_threshold: float | None = flag(
        None, "reward from which a rollout passes (default: rewards are 0 or 1, and 1 passes)", "float"
    )
    reward_timeout: float = flag(60.0, "deadline of one reward in seconds", "float", above=0)
    reward_num_workers: int = flag(2, "processes that check built-in rewards", "int", at_least=1)
    judge_url: str | None = flag(
        None, "URL of --rm-type judge: an engine's .../generate, or an OpenAI-compatible base URL", "str"
    )
    judge_model: str | None = flag(
        None, "the judge's name at a base URL, or its tokenizer's folder for an engine", "str"
    )
    judge_rubric: str | None = flag(None, "file or text with {prompt}, {response}, {label}", "str")
    judge_api_key_env: str | None = flag(None, "environment variable that holds the judge's key", "str")
    judge_scale: float = flag(10.0, "the judge's best score; the reward is its share of it", "float", above=0)
    judge_asks: int = flag(3, "how often a judge is asked at most until it gives a score", "int", at_least=1)
    judge_max_tokens: int = flag(1024, "most tokens of a judge's answer", "int", at_least=1)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation data sets and sampling; unset values are those of the rollout."""

    eval_function_path: str | None = flag(None, "eval function (default: the rollout function)", "str")
    eval_interval: int | None = flag(
        None, "evaluate every N rollout steps too, not only first and last", "int", at_least=1
    )
    eval_prompt_data: list[str] | None = flag(None, "pairs: name path name path ...", "strs")
    eval_config: str | None = flag(None, "YAML with eval.defaults and eval.datasets", "str")
    eval_own_engine: bool = flag(
        False,
        "evaluate on a second engine, at the weights of the moment, while training goes on; it holds the "
        "weights once more",
        "switch",
    )
    skip_eval_before_train: bool = flag(False, "no evaluation before the first step", "switch")
    eval_input_key: str | None = flag(None, "row key of the prompt", "str")
    eval_label_key: str | None = flag(None, "row key of the label", "str")
    eval_tool_key: str | None = flag(None, "row key of the tools", "str")
    n_samples_per_eval_prompt: int = flag(1, "samples per prompt", "int", at_least=1)
    eval_temperature: float | None = flag(None, "sampling temperature; 0 is greedy", "float", at_least=0)
    eval_top_p: float | None = flag(None, "nucleus sampling mass", "float", above=0, at_most=1)
    eval_top_k: int | None = flag(None, "sample among the k likeliest", "int", at_least=-1)
    eval_max_response_len: int | None = flag(None, "most new tokens", "int", at_least=1)
    eval_max_prompt_len: int | None = flag(None, "drop longer prompts at load", "int", at_least=1)
    eval_min_new_tokens: int | None = flag(None, "fewest new tokens", "int", at_least=0)
    eval_max_context_len: int | None = flag(None, "most tokens of prompt and response", "int", at_least=2)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The embedded engine. On the command line of `slime train` these carry the prefix ``--engine-``."""

    host: str = flag("127.0.0.1", "address to listen on", "str")
    port: int | None = flag(
        None,
        "port (default: a free one in training, 30000 in `slime serve`)",
        "int",
        at_least=0,
        at_most=65535,
    )
    dtype: str = flag("float32", "dtype of weights and cache", "str", choices=["float32", "bfloat16"])
    max_running_requests: int = flag(64, "requests decoded together", "int", at_least=1)
    max_total_tokens: int | None = flag(
        None,
        "tokens of key-value cache, live and kept for reuse (default: by free memory)",
        "int",
        at_least=16,
    )
    chunked_prefill_size: int = flag(2048, "prompt tokens of one forward pass", "int", at_least=1)
    context_length: int | None = flag(
        None, "most tokens of a request (default: the model's)", "int", at_least=2
    )
    num_threads: int | None = flag(
        None,
        "CPU threads of generation (default: all cores, half of them beside training)",
        "int",
        at_least=1,
    )
    enable_deterministic_inference: bool = flag(
        False,
        "answers do not depend on what else is asked: one request at a time, no prefix reuse; slow",
        "switch",
    )
    served_model_name: str | None = flag(None, "name in /v1/models (default: the model path)", "str")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes, what it shows, and debugging modes."""

    run_dir: str | None = flag(None, "folder of metrics, logs and dumps (default: runs/<time>)", "str")
    use_tensorboard: bool = flag(True, "write metrics to TensorBoard too", "tri")
    tb_project_name: str | None = flag(None, "TensorBoard folder (default: <run-dir>/tensorboard)", "str")
    tb_experiment_name: str | None = flag(None, "folder below it", "str")
    custom_rollout_log_function_path: str | None = flag(None, "logging hook of rollouts", "str")
    custom_eval_rollout_log_function_path: str | None = flag(None, "logging hook of evaluations", "str")
    dry_run: bool = flag(False, "check the configuration, print the plan and stop", "switch")
    debug_rollout_only: bool = flag(False, "generate without training", "switch")
    debug_train_only: bool = flag(False, "train without an engine, from --load-debug-rollout-data", "switch")
    save_debug_rollout_data: str | None = flag(
        None, "file for each rollout's samples, .jsonl; {rollout_id} is filled in", "str"
    )
    load_debug_rollout_data: str | None = flag(
        None, "train from such files; implies --debug-train-only", "str"
    )
    phase_timeout: float = flag(
        7200.0, "deadline of a phase (start, rollout, train, save) in seconds", "float", above=0
    )
    update_timeout: float = flag(600.0, "deadline of a weight update in seconds", "float", above=0)
    logprob_gap_warning: float = flag(
        0.1, "warn of a step where engine and trainer log-probs differ by more on average", "float", above=0
    )
    startup_check: bool = flag(True, "compare engine and trainer log-probs before the first step", "tri")
    custom_config_path: str | None = flag(None, "YAML of your own keys, for your hooks, on args", "str")


SECTIONS: dict[str, tuple[type, str]] = {
    "model": (ModelConfig, ""),
    "data": (DataConfig, ""),
    "rollout": (RolloutConfig, ""),
    "reward": (RewardConfig, ""),
    "evaluation": (EvalConfig, ""),
    "algorithm": (AlgorithmConfig, ""),
    "train": (TrainConfig, ""),
    "critic": (CriticConfig, "critic-"),
    "engine": (EngineConfig, "engine-"),
    "serving": (ServingConfig, ""),
    "weights": (WeightsConfig, ""),
    "run": (RunConfig, ""),
}
"""Section name -> (class, prefix of its flags)."""
