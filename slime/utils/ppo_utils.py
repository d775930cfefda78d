"""Public names for the arithmetic of `slime.train`, on plain tensors, for hooks and scripts.

Invariant: nothing is computed here that `slime.train` does not compute; torch is imported by the first call.
Knows no rows, ids or configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL estimate of each token; see `slime.train.kl.kl_estimate`.

    Raises:
        ValueError: `kl_loss_type` is not k1, k2, k3 or low_var_kl.
    """
    from slime.train.kl import kl_estimate, kl_type

    kind = kl_type(kl_loss_type)
    return kl_estimate(log_probs, log_probs_base, kind, importance_ratio=importance_ratio)


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss of each token, and 1.0 where the clip decided; `clipped_surrogate`.

    Args:
        ppo_kl: log pi_old - log pi, any shape.
        eps_clip, eps_clip_high: the ratio is clipped to [1 - eps_clip, 1 + eps_clip_high].
        eps_clip_c: dual clip constant above 1.
    """
    from slime.train.policy_loss import PolicyLoss, clipped_surrogate

    terms = PolicyLoss(clip_low=eps_clip, clip_high=eps_clip_high, dual_clip=eps_clip_c)
    return clipped_surrogate((-ppo_kl).exp(), advantages, terms)


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO's loss of each token, and 1.0 where the weight was clipped; `clipped_weight_loss`.

    Args:
        ppo_kl: log pi_old - log pi, any shape; no gradient flows through it.
        log_probs: log pi, with gradient.
    """
    from slime.train.policy_loss import PolicyLoss, clipped_weight_loss

    terms = PolicyLoss(clip_low=eps_clip, clip_high=eps_clip_high)
    return clipped_weight_loss((-ppo_kl).exp(), log_probs, advantages, terms)


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: Any = None,
    with_entropy: bool = False,
    chunk_size: int = -1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs [T] of `tokens`, and entropies in nats [T] if asked for, in float32.

    Args:
        logits: [T, V] over the whole vocabulary, divided by the temperature.
        tokens: [T] ids.
        tp_group: None, or a process group of one rank.
        chunk_size: positions that are computed at once; -1 is all.

    Raises:
        ValueError: `tp_group` splits the vocabulary over ranks, or lengths differ.
    """
    import torch

    if tp_group is not None and tp_group.size() > 1:
        raise ValueError(
            f"logits must hold the whole vocabulary; tp_group splits it over {tp_group.size()} ranks"
        )
    if len(logits) != len(tokens):
        raise ValueError(f"{len(logits)} rows of logits for {len(tokens)} tokens")
    size = chunk_size if chunk_size > 0 else max(len(tokens), 1)
    parts = [
        _chunk_log_probs(part, ids, with_entropy)
        for part, ids in zip(torch.split(logits, size), torch.split(tokens, size), strict=True)
    ]
    log_probs = torch.cat([found for found, _ in parts])
    return log_probs, torch.cat([entropy for _, entropy in parts]) if with_entropy else None


def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T], token by token; the definition that `chunked_gae` equals."""
    from slime.train import returns

    return returns.vanilla_gae(rewards, values, gamma=gamma, lambd=lambd)


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T] by a chunked scan; see `slime.train.returns.gae`."""
    from slime.train.returns import gae

    flat = gae(
        rewards.reshape(-1),
        values.reshape(-1),
        _lengths(rewards),
        gamma=gamma,
        lambd=lambd,
        chunk_size=chunk_size,
    )
    return flat[0].view_as(rewards), flat[1].view_as(rewards)


def chunked_discounted_returns(rewards: torch.Tensor, gamma: float, chunk_size: int = 128) -> torch.Tensor:
    """G_t = r_t + gamma G_{t+1} along the last dimension of [B, T] or [T], by a chunked scan."""
    from slime.train.returns import discounted_sums

    rows = rewards.reshape(-1, rewards.shape[-1])
    return discounted_sums(rows.reshape(-1), _lengths(rows), gamma, chunk_size=chunk_size).view_as(rewards)


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor,
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """Discounted returns of each sequence, 0.0 on tokens that do not train.

    The reward is paid at the last trained token, each trained token pays kl_coef * kl, and time passes over
    trained tokens only. Whitening is `slime.train.returns.whiten`. Source: arXiv:2501.03262.

    Args:
        rewards: [B] one a sequence.
        kl, loss_masks: for each sequence [length]; a sequence without trained tokens gives zeros.
    """
    import torch

    from slime.train.returns import discounted_sums

    found = []
    for reward, penalty, loss_mask in zip(rewards, kl, loss_masks, strict=True):
        mask = loss_mask.bool()
        shaped = -kl_coef * penalty[mask]
        shaped[-1:] += reward
        returns = torch.zeros_like(penalty)
        returns[mask] = discounted_sums(shaped, mask.sum().view(1), gamma)
        found.append(returns)
    return found


def _chunk_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    log_p = logits.float().log_softmax(-1)
    chosen = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    if not with_entropy:
        return chosen, chosen
    # A masked logit is -inf, and 0 * -inf is not the 0 that it should be.
    bounded = log_p.clamp_min(torch.finfo(log_p.dtype).min)
    return chosen, -(log_p.exp() * bounded).sum(-1)


def _lengths(rows: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.full((rows.shape[0],), rows.shape[1], dtype=torch.long, device=rows.device)
