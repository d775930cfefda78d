"""The flag table: every flag that slime has, with type, range, default and meaning, by section.

A section is the typed value that our own code receives; field names are the names on `args`.
A flag stands here only when it works. Knows nothing of parsing, files or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slime.config.flags import flag


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
    sglang_server_concurrency: int = flag(512, "most requests in flight at one engine", "int", at_least=1)
    rollout_timeout: float = flag(1800.0, "deadline of one rollout in seconds", "float", above=0)
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
class AlgorithmConfig:
    """From rewards to the loss."""

    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages; gspo and cispo also choose the loss, ppo trains a critic",
        "str",
        choices=[
            "grpo",
            "gspo",
            "cispo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "ppo",
        ],
    )
    loss_type: str = flag(
        "policy_loss",
        "policy_loss learns from rewards, sft_loss from the trained tokens of the data, custom_loss is yours",
        "str",
        choices=["policy_loss", "sft_loss", "custom_loss"],
    )
    custom_loss_function_path: str | None = flag(None, "loss hook, with --loss-type custom_loss", "str")
    compute_advantages_and_returns: bool = flag(
        True,
        "no advantages, for a loss of your own; implied by --loss-type sft_loss",
        "switch",
        name="disable-compute-advantages-and-returns",
        negated=True,
    )
    loss_mask_type: str = flag(
        "auto",
        "which tokens of a conversation train; all names mean the assistant's turns, for any chat template",
        "str",
        choices=["auto", "qwen", "qwen3", "qwen3_5", "distill_qwen"],
    )
    sibling_reward: str = flag(
        "rollout",
        "samples of one rollout carry its reward each (rollout), or parts that sum to it (sum)",
        "str",
        choices=["rollout", "sum"],
    )
    custom_reward_post_process_path: str | None = flag(
        None, "hook that shapes the rewards of a step, in place of their normalisation", "str"
    )
    normalize_advantages: bool = flag(
        False, "whiten advantages over the trained tokens of a rollout step", "switch"
    )
    use_opd: bool = flag(
        False, "on-policy distillation: subtract the log-ratio to a teacher from the advantages", "switch"
    )
    opd_type: str = flag(
        "sglang", "where the teacher is: behind an engine's URL, --rm-url", "str", choices=["sglang"]
    )
    opd_kl_coef: float = flag(1.0, "weight of that log-ratio", "float", above=0)
    gamma: float = flag(1.0, "discount per trained token", "float", at_least=0, at_most=1)
    lambd: float = flag(1.0, "decay of generalised advantage estimation", "float", at_least=0, at_most=1)
    value_clip: float = flag(0.2, "most that a value moves from its old one in the loss", "float", above=0)
    num_critic_only_steps: int = flag(
        0, "first rollout steps, in which the critic is trained and the actor is not", "int", at_least=0
    )
    kl_coef: float = flag(0.0, "weight of a KL penalty in the reward", "float", at_least=0)
    rewards_normalization: bool = flag(
        True, "use raw rewards as advantages", "switch", name="disable-rewards-normalization", negated=True
    )
    grpo_std_normalization: bool = flag(
        True,
        "only centre rewards, do not scale them (Dr.GRPO)",
        "switch",
        name="disable-grpo-std-normalization",
        negated=True,
    )
    eps_clip: float = flag(0.2, "lower clip of the probability ratio", "float", at_least=0, at_most=1)
    eps_clip_high: float | None = flag(None, "upper clip (default: --eps-clip)", "float", at_least=0)
    eps_clip_c: float | None = flag(None, "dual clip constant", "float", above=1)
    use_kl_loss: bool = flag(False, "add a KL term to the loss", "switch")
    kl_loss_coef: float = flag(0.0, "weight of the KL term", "float", at_least=0)
    kl_loss_type: str = flag("k1", "KL estimator", "str", choices=["k1", "k2", "k3", "low_var_kl"])
    use_unbiased_kl: bool = flag(False, "weight the KL estimate by the probability ratio", "switch")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", "float", at_least=0)
    loss_aggregation: str = flag(
        "rollout",
        "what weighs the same in a step; constant divides token sums by --loss-aggregation-tokens",
        "str",
        choices=["rollout", "token", "sample", "prompt", "constant"],
    )
    loss_aggregation_tokens: int | None = flag(None, "divisor of constant aggregation", "int", at_least=1)
    use_opsm: bool = flag(
        False,
        "leave out tokens with negative advantage in rollouts far from the old policy",
        "switch",
    )
    opsm_delta: float = flag(1e-4, "how far: mean of old - new log-prob of a rollout", "float", at_least=0)
    calculate_per_token_loss: bool = flag(False, "mean over tokens instead of rollouts", "switch")
    use_rollout_logprobs: bool = flag(False, "take the engine's log-probs as the old policy", "switch")
    use_tis: bool = flag(False, "truncated importance weights for the engine-trainer gap", "switch")
    tis_clip: float = flag(2.0, "upper bound of the weight", "float", above=0)
    tis_mode: str = flag(
        "clip",
        "what the bounds do: clip, truncate (the upper one only), or mask what is outside (IcePop)",
        "str",
        choices=["clip", "truncate", "mask"],
    )
    tis_clip_low: float = flag(0.0, "lower bound of the weight", "float", at_least=0)
    tis_level: str = flag(
        "token",
        "whose ratio is the weight: the token's, its rollout's product (sequence) or geometric mean",
        "str",
        choices=["token", "sequence", "geometric"],
    )
    tis_batch_normalize: bool = flag(False, "divide the weights by their mean over the step", "switch")
    use_rs: bool = flag(False, "leave out what is too far from the engine's log-probs", "switch")
    rs_level: str = flag(
        "token",
        "what is rejected by its ratio: tokens, or rollouts (sequence: product, geometric: mean)",
        "str",
        choices=["token", "sequence", "geometric"],
    )
    rs_lower_bound: float = flag(0.5, "reject ratios below", "float", at_least=0)
    rs_upper_bound: float = flag(2.0, "reject ratios above", "float", above=0)
    rs_veto_threshold: float | None = flag(
        None, "reject a rollout with any token whose ratio is below", "float", above=0
    )
    custom_tis_function_path: str | None = flag(
        None, "hook in place of the importance weights, with --use-tis", "str"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "hook that sums the policy-gradient loss of the rollouts of a step", "str"
    )
    custom_advantage_function_path: str | None = flag(
        None, "hook that makes the advantages, in place of the estimator", "str"
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimizer, precision and micro-batches."""

    train_backend: str = flag("torch", "trainer", "str", choices=["torch"])
    megatron_config_path: str | None = flag(
        None, "YAML of flags by role: what only the actor, or only the critic, has", "str"
    )
    train_precision: str = flag(
        "auto",
        "auto is bfloat16 autocast where the hardware is faster with it, else float32",
        "str",
        choices=["auto", "float32", "bfloat16"],
    )
    lr: float = flag(1e-6, "learning rate", "float", at_least=0)
    min_lr: float = flag(0.0, "learning rate at the end of a cosine decay", "float", at_least=0)
    lr_decay_style: str = flag("constant", "schedule after warm-up", "str", choices=["constant", "cosine"])
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", "int", at_least=0)
    lr_decay_iters: int | None = flag(None, "steps until --min-lr (default: all)", "int", at_least=1)
    weight_decay: float = flag(0.01, "AdamW weight decay", "float", at_least=0)
    adam_beta1: float = flag(0.9, "AdamW first moment decay", "float", at_least=0, at_most=1)
    adam_beta2: float = flag(0.999, "AdamW second moment decay", "float", at_least=0, at_most=1)
    adam_eps: float = flag(1e-8, "AdamW epsilon", "float", above=0)
    clip_grad: float = flag(1.0, "gradient norm clip; 0 is off", "float", at_least=0)
    micro_batch_size: int = flag(1, "samples per micro-batch", "int", at_least=1)
    use_dynamic_batch_size: bool = flag(False, "fill micro-batches up to --max-tokens-per-gpu", "switch")
    max_tokens_per_gpu: int | None = flag(None, "tokens per micro-batch", "int", at_least=1)
    tree_batches: str = flag(
        "auto",
        "compute prefixes that samples share once: on, off, or where that saves at least 5 % of the tokens; "
        "a micro-batch that shares holds as many tokens as two samples of the longest length, or more if "
        "--micro-batch-size or --max-tokens-per-gpu says so",
        "str",
        choices=["auto", "on", "off"],
    )
    balance_data: bool = flag(
        True, "deal rows to train processes by FLOPs (off: in equal numbers, by rollout)", "tri"
    )
    actor_num_nodes: int = flag(1, "machines that train", "int", at_least=1)
    actor_num_gpus_per_node: int = flag(
        1, "train processes of each machine: one a GPU, or on CPU where there is none", "int", at_least=1
    )
    distributed_timeout_minutes: int = flag(
        10, "how long a train process waits for another before the run ends", "int", at_least=1
    )
    tensor_model_parallel_size: int = flag(
        1,
        "train processes that share one row; more than 1 is not supported by the torch trainer",
        "int",
        at_least=1,
    )
    balance_by_flops: bool = flag(
        True, "even out the micro-batches of a train process by FLOPs (off: by tokens)", "tri"
    )
    log_probs_chunk_size: int = flag(
        -1, "tokens whose logits are held at once; -1 chooses", "int", at_least=-1
    )
    deterministic_mode: bool = flag(
        False,
        "a run gives the same samples and weights each time, bit for bit; generates one answer at a time",
        "switch",
    )
    train_num_threads: int | None = flag(
        None, "CPU threads of training (default: all cores)", "int", at_least=1
    )
    gradient_checkpointing: bool = flag(
        False, "keep only the input of each layer, and compute the rest again in the backward", "switch"
    )
    optimizer_cpu_offload: bool = flag(
        False, "on a GPU: AdamW's state and step on the CPU, at the price of two copies a step", "switch"
    )
    lora_rank: int = flag(0, "train LoRA adapters of this rank; 0 trains all weights", "int", at_least=0)
    lora_alpha: float = flag(32.0, "adapters are scaled by alpha / rank", "float", above=0)
    lora_dropout: float = flag(0.0, "0 only: with dropout, log-probs would not be exact", "float")
    lora_target_modules: list[str] = flag(
        ["all-linear"], "names of the layers with an adapter, e.g. q_proj v_proj", "strs"
    )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """What the critic of PPO does differently from the actor; unset values are the actor's.

    On the command line these carry the prefix ``--critic-``.
    """

    load: str | None = flag(
        None, "Hugging Face folder it starts from, value head included (default: --hf-checkpoint)", "str"
    )
    save: str | None = flag(None, "folder for its Hugging Face export; {rollout_id} is filled in", "str")
    num_epochs: int = flag(1, "passes over the optimizer steps of a rollout step", "int", at_least=1)
    lr: float | None = flag(None, "learning rate", "float", above=0)
    min_lr: float | None = flag(None, "learning rate at the end of a cosine decay", "float", at_least=0)
    lr_warmup_iters: int | None = flag(None, "steps of linear warm-up", "int", at_least=0)
    weight_decay: float | None = flag(None, "AdamW weight decay", "float", at_least=0)
    clip_grad: float | None = flag(None, "gradient norm clip; 0 is off", "float", at_least=0)

    def train_config(self, actor: TrainConfig) -> TrainConfig:
        """The actor's section with what is set here in its place."""
        names = ("lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad")
        return replace(actor, **{n: getattr(self, n) for n in names if getattr(self, n) is not None})


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
    num_threads: int | None = flag(None, "CPU threads of generation (default: all cores)", "int", at_least=1)
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
    "run": (RunConfig, ""),
}
"""Section name -> (class, prefix of its flags)."""
