import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import DataError
from slime.train.policy_loss import PolicyLoss, PolicyTokens, policy_losses
from slime.train.sequence import mean_log_ratios, rollout_means
from tests.train.rollouts import cut, rollouts, whole
from tests.train.rows import row

quick = settings(max_examples=25, deadline=None)


@given(rollouts(), st.integers(0, 999))
@quick
def test_law_3_a_rollout_has_one_mean_log_ratio_however_it_is_cut(batch, seed):
    rows, fields = whole(batch)
    pieces, piece_fields = cut(batch, seed)
    found = mean_log_ratios(rows, fields["log_probs"], fields["old_log_probs"])
    assert found == mean_log_ratios(pieces, piece_fields["log_probs"], piece_fields["old_log_probs"])
    for each in batch:
        pairs = zip(each.mask, each.fields["log_probs"], each.fields["old_log_probs"], strict=True)
        ratios = [new - old for mask, new, old in pairs if mask]
        assert found[each.rollout] == pytest.approx(sum(ratios) / len(ratios))


def test_errors_name_rollout_sample_and_lengths():
    with pytest.raises(DataError, match=r"rollout 0, sample 0: old_log_probs has length 1.* 2 tokens"):
        mean_log_ratios([row(0)], {0: [0.0, 0.0]}, {0: [0.0]})


def gspo_direct(log_probs, old, advantages, sizes, low, high):
    """arXiv:2507.18071, equation 5, as a loss: autograd goes through the mean of each sequence."""
    losses = []
    for new, before, advantage in zip(
        torch.split(log_probs, sizes), torch.split(old, sizes), advantages, strict=True
    ):
        ratio = ((new - before).sum() / len(new)).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
    return torch.stack(losses).mean()


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(0, 999),
    st.lists(st.integers(1, 9), max_size=4),
)
@quick
def test_gspo_in_any_micro_batches_has_the_gradient_of_the_direct_formula(sizes, seed, cuts):
    random = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    log_probs = -torch.rand(total, dtype=torch.float64, generator=random).requires_grad_()
    old = log_probs.detach() + 0.2 * torch.randn(total, dtype=torch.float64, generator=random)
    advantages = torch.randn(len(sizes), dtype=torch.float64, generator=random)
    direct = gspo_direct(log_probs, old, advantages, sizes, 0.1, 0.2)
    (expected,) = torch.autograd.grad(direct, log_probs)

    lengths = torch.tensor(sizes)
    ids = torch.arange(len(sizes)).repeat_interleave(lengths)
    mean = rollout_means((log_probs - old).detach(), ids)
    weight = (1 / (lengths.double() * len(sizes))).repeat_interleave(lengths)
    order = torch.randperm(total, generator=random)
    bounds = sorted({0, total, *(c for c in cuts if c < total)})
    value, gradient = 0.0, torch.zeros_like(expected)
    for start, stop in itertools.pairwise(bounds):
        at = order[start:stop]
        tokens = PolicyTokens(
            log_probs=log_probs[at],
            old_log_probs=old[at],
            advantages=advantages[ids[at]],
            entropy=torch.zeros(len(at)),
            sequence_log_ratio=mean[at],
        )
        losses, _ = policy_losses(tokens, PolicyLoss(surrogate="gspo", clip_low=0.1, clip_high=0.2))
        part = (losses * weight[at]).sum()
        value += part.item()
        gradient += torch.autograd.grad(part, log_probs)[0]
    assert value == pytest.approx(direct.item(), abs=1e-9)
    assert torch.allclose(gradient, expected, atol=1e-9)
