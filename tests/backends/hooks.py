"""Hooks for tests of training, and what loads them."""

from types import SimpleNamespace

import torch

from slime.backends.hooks import DESTS, load_hooks
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

TEMPERATURE = 1.3


def hooks(**functions):
    """`TrainHooks` of these functions, by field."""
    paths = {dest: f"tests.{field}" if field in functions else None for field, dest in DESTS.items()}
    by_dest = {DESTS[field]: function for field, function in functions.items()}
    return load_hooks(SimpleNamespace(my_key=3.0, **paths), lambda path, dest: by_dest[dest])


def sequence_correction(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """A weight a sequence, and tokens far from the engine out."""
    gaps = [ours - engine for ours, engine in zip(train_log_probs, rollout_log_probs, strict=True)]
    weights = [
        (gap * mask).sum().div(mask.sum()).exp().clamp(max=1.1).expand_as(gap)
        for gap, mask in zip(gaps, loss_masks, strict=True)
    ]
    masks = [mask * (gap.abs() < 4.6) for gap, mask in zip(gaps, loss_masks, strict=True)]
    metrics = {"my_weight": torch.cat(weights), "my_rows": gaps, "my_count": float(len(gaps))}
    return pg_loss * torch.cat(weights), masks, metrics


def divide_by_longest(total_lengths, response_lengths, masks, per_token):
    """Token sums over a constant, the longest rollout."""
    longest = max(response_lengths)

    def reduce(loss):
        parts = torch.split(loss, response_lengths)
        return sum((part * mask).sum() for part, mask in zip(parts, masks, strict=True)) / longest

    return reduce


def rewards_and_kl(args, rollout_data):
    """Advantage of a token: its row's normalised reward minus a penalty; returns too."""
    advantages = [
        reward - 0.1 * log_probs + torch.zeros(length)
        for reward, log_probs, length in zip(
            rollout_data["rewards"], rollout_data["log_probs"], rollout_data["response_lengths"], strict=True
        )
    ]
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = [2 * row for row in advantages]


def response_log_probs(batch, logits):
    """Log-probs of the response tokens, rows after one another."""
    found, end = [], 0
    for tokens, length in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        end += len(tokens)
        rows = logits[0, end - length - 1 : end - 1] / TEMPERATURE
        found.append(calculate_log_probs_and_entropy(rows, tokens[-length:])[0])
    return torch.cat(found)


def ppo(args, batch, logits, sum_of_sample_mean):
    """The built-in loss, written anew."""
    ratio = (response_log_probs(batch, logits) - torch.cat(batch["log_probs"])).exp()
    advantages = torch.cat(batch["advantages"])
    losses = torch.max(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    return sum_of_sample_mean(losses), {"my_ratio": sum_of_sample_mean(ratio)}
