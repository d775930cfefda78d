"""TRL's arithmetic beside slime's: the loss method of its trainer, with the log-probs given."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from arithmetic_batch import CLIPS, ROLLOUTS, TOKENS, Row, advantages, loss_and_gradient, make_batch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

BATCH = make_batch()
GIVEN = advantages(BATCH)


def loss_of_trl(**settings):
    """`GRPOTrainer._compute_loss` on a trainer that has these log-probs instead of a model's."""
    log_probs = BATCH.log_probs.clone().requires_grad_()

    class Given(GRPOTrainer):
        def __init__(self):
            self.accelerator = Accelerator(cpu=True)
            self.model = SimpleNamespace(training=False)
            self.args = SimpleNamespace(
                delta=settings.pop("delta", None), use_bias_correction_kl=settings.pop("unbiased", False)
            )
            self._metrics = {"eval": defaultdict(list)}
            self.max_completion_length = TOKENS
            self.epsilon_low, self.epsilon_high = CLIPS.values()
            self.importance_sampling_level, self.top_entropy_quantile = "token", 1.0
            self.aux_loss_enabled = self.use_vllm = self.use_adaptive_entropy = False
            self.off_policy_mask_threshold, self.beta = None, 0.0
            self.entropy_coef, self._entropy_bonus_enabled = 0.0, "entropy_coef" in settings
            vars(self).update(settings)

        def _get_per_token_logps_and_entropies(self, *_, **__):
            return log_probs, BATCH.entropy, None

    inputs = {
        "prompt_ids": torch.zeros(ROLLOUTS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROLLOUTS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ROLLOUTS, TOKENS, dtype=torch.long),
        "completion_mask": BATCH.mask,
        "advantages": GIVEN,
        "old_per_token_logps": BATCH.old,
        "ref_per_token_logps": BATCH.ref,
        "num_items_in_batch": BATCH.mask.sum(),
    }
    value = Given()._compute_loss(None, inputs)
    value.backward()
    return torch.cat([value.detach()[None], log_probs.grad.flatten()])


def loss(what, aggregation, loss_type, why=None, *, theirs=None, function=None, **ours):
    """A loss and its gradient, with these settings of ours and theirs."""
    constant = TOKENS if aggregation == "constant" else None
    return Row(
        what,
        f"{ours.get('surrogate', 'ppo')}, {aggregation}",
        function or GRPOTrainer._compute_loss,
        partial(loss_and_gradient, BATCH, GIVEN, aggregation, constant, **(CLIPS | ours)),
        partial(loss_of_trl, loss_type=loss_type, **(theirs or {})),
        why,
    )


def scaled_rewards():
    """The advantages of its trainer, [B, T]; it has them inside a method that generates."""
    rewards = BATCH.rewards.view(2, -1)
    deviation = nanstd(rewards, dim=1)[:, None] + 1e-4
    return ((rewards - rewards.nanmean(dim=1, keepdim=True)) / deviation).view(-1, 1) * BATCH.mask


def equal():
    """Where the definitions agree."""
    kl = {"kl_type": "k3", "kl_coef": 0.1}
    opsm = {"off_policy_mask_threshold": 0.02}
    unbiased = {"beta": 0.1, "unbiased": True}
    bounds = {"epsilon_high": 1.28}
    mask = GRPOTrainer.get_off_policy_mask
    sequence = {"importance_sampling_level": "sequence"}
    return [
        loss("PPO clip, mean over rollouts", "rollout", "grpo"),
        loss("PPO clip, mean over tokens", "token", "bnpo"),
        loss("DAPO", "token", "dapo"),
        loss("Dr.GRPO", "constant", "dr_grpo"),
        loss("dual clip", "rollout", "grpo", theirs={"delta": 1.3}, dual_clip=1.3),
        loss("GSPO", "rollout", "grpo", theirs=sequence, surrogate="gspo"),
        loss("CISPO, weights to 1.28", "token", "cispo", theirs=bounds, surrogate="cispo", clip_low=1.0),
        loss("KL in the loss", "rollout", "grpo", theirs={"beta": 0.1}, **kl),
        loss("unbiased KL in the loss", "rollout", "grpo", theirs=unbiased, unbiased_kl=True, **kl),
        loss("OPSM", "rollout", "grpo", theirs=opsm, function=mask, opsm_delta=0.02),
        loss(
            "entropy bonus, mean over tokens", "token", "bnpo", theirs={"entropy_coef": 0.1}, entropy_coef=0.1
        ),
    ]


def different():
    """Where they do not, and why."""
    entropy = "all terms have one aggregation here; TRL's entropy is always a mean over tokens"
    cispo = "TRL has no lower bound, and its epsilon_high is the bound itself, not the distance from 1"
    epsilon = "TRL adds 1e-4 to the standard deviation, slime and verl 1e-6"
    return [
        loss("entropy bonus", "rollout", "grpo", entropy, theirs={"entropy_coef": 0.1}, entropy_coef=0.1),
        loss("CISPO, the same settings", "token", "cispo", cispo, surrogate="cispo"),
        Row("advantages, GRPO", "grpo", nanstd, partial(advantages, BATCH), scaled_rewards, epsilon),
    ]
