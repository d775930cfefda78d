"""The flags of training: from rewards to the loss, the optimizer, the critic. See sections.py.

A flag stands here only when it works. Knows nothing of parsing, files or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime.config.flags import flag


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
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "hook that makes the rows of training of a step's samples, rewards included", "str"
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
    use_decoupled_loss: bool = flag(
        False,
        "clip rollouts of an older policy around the weights before the step, and weigh them by --use-tis, "
        "instead of clipping around the policy that sampled them",
        "switch",
    )
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
    use_rollout_routing_replay: bool = flag(
        False,
        "mixtures of experts: train each token through the experts that it went to in the engine (R3)",
        "switch",
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "hook that changes advantages or loss masks of a rollout step before it trains", "str"
    )

    @property
    def gives_final_rewards(self) -> bool:
        """Whether a hook gives rewards that are taken as they are, without normalisation."""
        return bool(self.custom_reward_post_process_path or self.custom_convert_samples_to_train_data_path)


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
        None, "CPU threads of training (default: all cores, half of them beside rollouts)", "int", at_least=1
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
