"""Conversions of samples to training data, as users write them; good ones."""

from collections import defaultdict


def rows_of(args, samples):
    """Everything that the published slime puts into its training data."""
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    sums = defaultdict(int)
    for sample, mask in zip(samples, masks, strict=True):
        sums[sample.rollout_id] += sum(mask)
    return {
        "tokens": [list(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.get_reward_value(args) for sample in samples],
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
        "loss_masks": [list(mask) for mask in masks],
        "rollout_mask_sums": [sums[sample.rollout_id] for sample in samples],
        "round_number": [1 for _ in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def without_ids(args, samples):
    """Only what must be there."""
    data = rows_of(args, samples)
    for name in ("rollout_ids", "rollout_mask_sums", "round_number", "rollout_log_probs"):
        del data[name]
    return data


def from_the_last(args, samples):
    """Rows in another order."""
    return {name: values[::-1] for name, values in rows_of(args, samples).items()}


def halves(args, samples):
    """Each sample as two rows of its rollout: the second holds the last trained token."""
    data = {
        name: [value for value in values for _ in range(2)] for name, values in rows_of(args, samples).items()
    }
    for k, mask in enumerate(data["loss_masks"]):
        last = max(t for t, value in enumerate(mask) if value)
        data["loss_masks"][k] = [int(value and (t == last) == bool(k % 2)) for t, value in enumerate(mask)]
    return data


def doubled_rewards(args, samples):
    data = rows_of(args, samples)
    return data | {"rewards": [2 * reward for reward in data["rewards"]]}


def changed(args, samples):
    """`rows_of` in which `args.changes` makes fields of (values, samples), or takes them out (None)."""
    data = rows_of(args, samples)
    for name, make in args.changes.items():
        data[name] = None if make is None else make(data.get(name), samples)
    return data


def nothing(args, samples):
    return None


def breaks(args, samples):
    return {"tokens": samples[99]}
