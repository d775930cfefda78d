"""Hooks of a user, right and wrong."""

import itertools

import torch

CALLS = itertools.count(1)


def by_rollout(args, rollout_data):
    """Advantages from rewards and tokens alone."""
    rollout_data["advantages"] = [
        reward - 0.1 * log_probs
        for reward, log_probs in zip(rollout_data["rewards"], rollout_data["log_probs"], strict=True)
    ]


def by_row(args, rollout_data):
    """Advantages over the length of the row: a rollout in two rows has others."""
    rollout_data["advantages"] = [
        torch.full((length,), float(reward) / length)
        for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
    ]


def by_chance(args, rollout_data):
    """Advantages that are other ones in every call."""
    call = next(CALLS)
    rollout_data["advantages"] = [
        torch.full((length,), float(call + row))
        for row, length in enumerate(rollout_data["response_lengths"])
    ]


def none(args, rollout_data):
    """No advantage at all."""
    rollout_data["advantages"] = [torch.zeros(length) for length in rollout_data["response_lengths"]]


def longest(total_lengths, response_lengths, masks, per_token):
    """A reducer that divides by the longest rollout."""
    return lambda loss: loss.sum() / max(response_lengths)
