"""Random rollouts for tests of the training arithmetic, and ways to cut them into rows."""

import itertools
import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from slime.train.rewards import TokenRewards
from tests.train.rows import row

FIELDS = ("log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "values")


@dataclass
class Rollout:
    """One uncut rollout: a mask, one list of numbers a field, and a reward."""

    rollout: int
    group: int
    mask: tuple[int, ...]
    reward: float | TokenRewards
    fields: dict[str, list[float]]


@st.composite
def rollouts(draw, *, listed=False, most=6):
    """A few rollouts in uneven groups; each has at least one trained token."""
    count = draw(st.integers(1, most))
    return [make(i, draw(st.integers(0, 2)), draw(st.integers(0, 2**20)), listed) for i in range(count)]


def make(rollout, group, seed, listed=False):
    rng = random.Random(seed)
    mask = [rng.randint(0, 1) for _ in range(rng.randint(1, 9))]
    mask[rng.randrange(len(mask))] = 1
    fields = {name: [rng.uniform(-2, 0) for _ in mask] for name in FIELDS}
    reward = rng.choice([0.0, 0.3, 0.7, 1.0, rng.uniform(-1, 1)])
    if listed:
        reward = TokenRewards(tuple(m * rng.choice([0.0, 0.3, -1.0, 0.7]) for m in mask))
    return Rollout(rollout, group, tuple(mask), reward, fields)


def whole(batch):
    """Every rollout as one row."""
    return cut(batch, None)


def cut(batch, seed):
    """Rows and their fields by index: rollouts cut at random places, rows shuffled."""
    rng = random.Random(seed)
    rows, fields = [], {name: {} for name in FIELDS}
    for each in batch:
        inner = range(1, len(each.mask))
        places = [] if seed is None else sorted(rng.sample(inner, rng.randint(0, len(inner))))
        for k, (start, stop) in enumerate(itertools.pairwise([0, *places, len(each.mask)])):
            index = 100 * each.rollout + k
            reward = each.reward
            if isinstance(reward, TokenRewards):
                reward = TokenRewards(reward.values[start:stop])
            engine = tuple(each.fields["log_probs"][start:stop])
            rows.append(
                row(
                    index,
                    reward,
                    rollout=each.rollout,
                    group=each.group,
                    mask=each.mask[start:stop],
                    log_probs=engine,
                )
            )
            for name in FIELDS:
                fields[name][index] = each.fields[name][start:stop]
    if seed is not None:
        rng.shuffle(rows)
    return rows, fields


def joined(rows, by_index):
    """Values of each rollout's tokens, pieces put together again."""
    found = {}
    for sample in sorted(rows, key=lambda s: s.index):
        found.setdefault(sample.rollout_id, []).append(torch.as_tensor(by_index[sample.index]))
    return {rollout: torch.cat(parts).tolist() for rollout, parts in found.items()}
