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


def scaled_by_rollout(args, rollout_id, rollout_data):
    """Advantages times a number of the rollout."""
    for rollout, advantages in zip(rollout_data["rollout_ids"], rollout_data["advantages"], strict=True):
        advantages *= 1 + rollout


def scaled_by_row(args, rollout_id, rollout_data):
    """Advantages over the length of the row."""
    for length, advantages in zip(rollout_data["response_lengths"], rollout_data["advantages"], strict=True):
        advantages /= length


def longest(total_lengths, response_lengths, masks, per_token):
    """A reducer that divides by the longest rollout."""
    return lambda loss: loss.sum() / max(response_lengths)


def centred_over_samples(args, samples):
    """Rewards less their mean, to which every sample adds: a rollout in two samples counts twice."""
    rewards = [sample.reward for sample in samples]
    mean = sum(rewards) / len(rewards)
    return rewards, [reward - mean for reward in rewards]


def doubled(args, samples):
    """Rewards twice as large."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return rewards, [2 * reward for reward in rewards]


def mean_of_rows(args, batch, logits, sum_of_sample_mean):
    """A loss that divides by the number of rows it is given."""
    return logits.square().mean() / len(batch["rollout_ids"]), {}


def likelihood(args, batch, logits, sum_of_sample_mean):
    """Negative log-likelihood, weighed as the flags say."""
    log_probs, offset = [], 0
    for tokens, length in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        rows = logits[0, offset + len(tokens) - length - 1 : offset + len(tokens) - 1].log_softmax(-1)
        log_probs.append(rows.gather(1, tokens[-length:, None])[:, 0])
        offset += len(tokens)
    return -sum_of_sample_mean(torch.cat(log_probs)), {}
