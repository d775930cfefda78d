"""Rows for tests of the training arithmetic."""

from slime.train.batch import TrainSample


def row(index, reward=1.0, *, rollout=None, group=0, mask=(1, 1), votes=True, tokens=None, log_probs=None):
    """A `TrainSample`; its prompt is one token where `tokens` is not given."""
    mask = tuple(mask)
    return TrainSample(
        index=index,
        rollout_id=index if rollout is None else rollout,
        group_index=group,
        tokens=tuple(tokens) if tokens is not None else (1, *range(2, 2 + len(mask))),
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        reward=reward,
        votes=votes,
    )
