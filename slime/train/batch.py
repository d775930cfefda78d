"""What training is given: one `TrainSample` a token row, carrying its ids.

Invariant: statistics, weights and baselines come from `group_index` and `rollout_id`, never from order.
Torch-free; knows nothing of hooks, engines or files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from slime.utils.routes import Routes


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """One reward a turn of the row: an unbroken run of trained tokens. It is paid at the last of them."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """One reward a response token; 0.0 on tokens that do not train."""

    values: tuple[float, ...]


Reward: TypeAlias = float | TurnRewards | TokenRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One row. Per-token tuples cover the last `response_length` of `tokens`.

    Attributes:
        index: sample id; unique in the batch.
        rollout_id: execution that made it; siblings share it and count once.
        group_index: prompt group whose rollouts are each other's baseline.
        loss_mask: 1 where the policy sampled the token and it trains.
        rollout_log_probs: natural log-probs under the sampling distribution, or None when not recorded.
        reward: the rollout's one number, or the row's part of its rewards a turn or a token.
        raw_reward: what the reward was before a hook shaped it; None where it is the reward itself.
        teacher_log_probs: the teacher's natural log-probs (on-policy distillation), or None.
        votes: False takes the row out of baselines and out of the loss (failed, aborted, removed).
        policy_version: weight version that sampled it first.
        routed_experts: experts that each token but the last went to in the engine, [tokens - 1, layers,
        top_k],
            all layers of the model; -1 where that is not known. None where routes are not replayed.
    """

    index: int
    rollout_id: int
    group_index: int
    tokens: tuple[int, ...]
    response_length: int
    loss_mask: tuple[int, ...]
    rollout_log_probs: tuple[float, ...] | None
    reward: Reward
    votes: bool = True
    policy_version: int = 0
    raw_reward: float | None = None
    teacher_log_probs: tuple[float, ...] | None = None
    routed_experts: Routes | None = field(default=None, compare=False)

    @property
    def prompt_length(self) -> int:
        """Tokens before the response."""
        return len(self.tokens) - self.response_length

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return sum(self.loss_mask) if self.votes else 0
