"""What conformance is shown of, one line a case: a new estimator, aggregation or option is a new line."""

from slime.config.training_sections import AlgorithmConfig

ESTIMATORS = {
    "grpo": {},
    "dr_grpo": {"grpo_std_normalization": False},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.3, "eps_clip_high": 0.3},
    "cispo": {"advantage_estimator": "cispo"},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "ppo": {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, "value_clip": 0.1},
    "sft": {"loss_type": "sft_loss"},
}
AGGREGATIONS = {
    "rollout": {},
    "token": {"loss_aggregation": "token"},
    "sample": {"loss_aggregation": "sample"},
    "prompt": {"loss_aggregation": "prompt"},
    "constant": {"loss_aggregation": "constant", "loss_aggregation_tokens": 7},
}
OPTIONS = {
    "raw rewards": {"rewards_normalization": False},
    "rewards that add up": {"sibling_reward": "sum"},
    "whitening": {"normalize_advantages": True},
    "KL in the reward": {"kl_coef": 0.1, "kl_loss_type": "k3"},
    "KL in the returns": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.95},
    "KL in the loss": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
    "unbiased KL": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True, "kl_loss_type": "k2"},
    "entropy": {"entropy_coef": 0.01},
    "dual clip": {"eps_clip_c": 1.2, "use_rollout_logprobs": True},
    "engine's log-probs as old": {"use_rollout_logprobs": True},
    "OPSM": {"use_opsm": True, "opsm_delta": 0.01, "use_rollout_logprobs": True},
    "GSPO on the engine's log-probs": {"advantage_estimator": "gspo", "use_rollout_logprobs": True},
    "TIS": {"use_tis": True, "tis_clip": 1.1},
    "IcePop": {"use_tis": True, "tis_mode": "mask", "tis_clip": 1.3, "tis_clip_low": 0.7},
    "weights of rollouts": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.5},
    "geometric weights": {"use_tis": True, "tis_level": "geometric", "tis_batch_normalize": True},
    "rejected rollouts": {
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.9,
        "rs_upper_bound": 1.2,
    },
    "veto": {"use_rs": True, "rs_veto_threshold": 0.6},
    "KL in the rewards of PPO": {"advantage_estimator": "ppo", "kl_coef": 0.1, "normalize_advantages": True},
    "distillation": {"use_opd": True, "opd_kl_coef": 0.5},
    "mean over tokens": {"calculate_per_token_loss": True},
}


def cases():
    """Every estimator with every aggregation, and every option: name -> flags."""
    pairs = {f"{e}, {a}": left | right for e, left in ESTIMATORS.items() for a, right in AGGREGATIONS.items()}
    return {name: AlgorithmConfig(**flags) for name, flags in (pairs | OPTIONS).items()}
