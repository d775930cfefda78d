"""One batch of random rollouts as padded tensors [B, T], and slime's arithmetic on it in that shape."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from slime.train.advantages import Estimator, TokenInputs, token_advantages
from slime.train.aggregate import row_weights
from slime.train.batch import TrainSample
from slime.train.corrections import CorrectionRule, step_corrections
from slime.train.policy_loss import PolicyLoss, PolicyTokens, policy_losses
from slime.train.sequence import mean_log_ratios

ROLLOUTS, TOKENS = 8, 12
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


@dataclass(frozen=True)
class Row:
    """A comparison: names, the two computations, and why they differ, None where they must not."""

    what: str
    name: str
    function: Callable
    ours: Callable
    theirs: Callable
    why: str | None = None


@dataclass(frozen=True)
class Batch:
    """Rollouts of two groups, of different lengths, with tool tokens (mask 0) between trained ones.

    `log_probs`, `old`, `ref`, `engine`, `values`, `old_values`, `entropy` are [B, T] float64.
    """

    rewards: torch.Tensor
    groups: torch.Tensor
    mask: torch.Tensor
    rollouts: tuple
    fields: dict = field(default_factory=dict)

    def __getattr__(self, name):
        return self.fields[name]

    def samples(self):
        return [
            TrainSample(
                index=i,
                rollout_id=self.rollouts[i],
                group_index=int(self.groups[i]),
                tokens=(0,) * (TOKENS + 1),
                response_length=TOKENS,
                loss_mask=tuple(self.mask[i].int().tolist()),
                rollout_log_probs=tuple(self.engine[i].tolist()),
                reward=float(self.rewards[i]),
            )
            for i in range(ROLLOUTS)
        ]

    def rows(self, name):
        return {i: self.fields[name][i] for i in range(ROLLOUTS)}

    def token_rewards(self):
        """[B, T]: each reward at the last trained token."""
        found = torch.zeros_like(self.mask)
        last = TOKENS - 1 - self.mask.flip(1).argmax(1)
        return found.index_put((torch.arange(ROLLOUTS), last), self.rewards)


def make_batch(
    seed=0, groups=(0, 0, 0, 0, 1, 1, 1, 1), rollouts=tuple(range(ROLLOUTS)), spread=0.3, reward=None
):
    """A batch; `spread` is how far the policies are apart, `reward` that of all rollouts (float32)."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale, shift=0.0):
        return torch.randn(ROLLOUTS, TOKENS, dtype=torch.float64, generator=random) * scale + shift

    mask = torch.ones(ROLLOUTS, TOKENS, dtype=torch.float64)
    for i in range(ROLLOUTS):
        mask[i, 4 + i :] = 0
        mask[i, 2 : 2 + i % 3] = 0
    log_probs = normal(0.5, -2.0)
    fields = {
        "log_probs": log_probs,
        "old": log_probs + normal(spread),
        "ref": log_probs + normal(spread),
        "engine": log_probs + normal(spread),
        "values": normal(0.5),
        "old_values": normal(0.5),
        "entropy": normal(0.1, 1.0).abs(),
    }
    rewards = torch.rand(ROLLOUTS, dtype=torch.float64, generator=random)
    if reward is not None:
        rewards = torch.full((ROLLOUTS,), reward)
    rewards = rewards[list(rollouts)]
    return Batch(rewards, torch.tensor(groups), mask.to(rewards.dtype), rollouts, fields)


def advantages(batch, **estimator):
    """[B, T], 0 where the mask is."""
    inputs = TokenInputs(values=batch.rows("values"))
    found = token_advantages(batch.samples(), Estimator(**estimator), inputs)
    return torch.stack([found.advantages[i] for i in range(ROLLOUTS)])


def returns(batch, **estimator):
    """[B, T] value targets."""
    inputs = TokenInputs(values=batch.rows("values"))
    found = token_advantages(batch.samples(), Estimator(**estimator), inputs)
    return torch.stack([found.returns[i] for i in range(ROLLOUTS)])


def loss_and_gradient(batch, weights_of, aggregation="rollout", constant=None, correction=None, **loss):
    """The loss of the batch, and its gradient at the log-probs [B, T].

    Args:
        weights_of: advantages [B, T].
        correction: factors [B, T], or None.
    """
    samples, mask = batch.samples(), batch.mask.bool()
    weights = row_weights(samples, mode=aggregation, constant=constant)
    ratios = mean_log_ratios(samples, batch.rows("log_probs"), batch.rows("old"))
    log_probs = batch.log_probs.clone().requires_grad_()
    per_row = torch.tensor([[ratios[i], weights[i]] for i in range(ROLLOUTS)], dtype=torch.float64)
    ratio, weight = (column[:, None].expand_as(mask)[mask] for column in per_row.T)
    tokens = PolicyTokens(
        log_probs=log_probs[mask],
        old_log_probs=batch.old[mask],
        ref_log_probs=batch.ref[mask],
        rollout_log_probs=batch.engine[mask],
        advantages=weights_of[mask],
        entropy=batch.entropy[mask],
        sequence_log_ratio=ratio,
        correction=None if correction is None else correction[mask],
    )
    losses, _ = policy_losses(tokens, PolicyLoss(**loss))
    value = (losses * weight).sum()
    value.backward()
    return torch.cat([value.detach()[None], log_probs.grad.flatten()])


def corrections(batch, rule: CorrectionRule):
    """Factors [B, T], 0 where the mask is."""
    samples = batch.samples()
    found, _ = step_corrections(samples, batch.rows("old"), row_weights(samples), rule)
    return torch.stack([found[i] for i in range(ROLLOUTS)])
