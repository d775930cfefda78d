import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.train.returns import discounted_sums, gae, vanilla_gae, whiten

quick = settings(max_examples=40, deadline=None)


def sequences(lengths, seed):
    return torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([2, 3, 8, 128]),
    st.integers(0, 99),
)
@quick
def test_chunked_sums_equal_the_loop_and_stay_in_their_sequence(lengths, factor, chunk, seed):
    values = sequences(lengths, seed) if lengths else torch.zeros(0, dtype=torch.float64)
    expected = []
    for part in torch.split(values, lengths) if lengths else []:
        running, backward = 0.0, []
        for value in reversed(part.tolist()):
            running = value + factor * running
            backward.append(running)
        expected += backward[::-1]
    found = discounted_sums(values, torch.tensor(lengths, dtype=torch.long), factor, chunk_size=chunk)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 4), st.integers(1, 50), st.sampled_from([2, 4, 16]), st.floats(0.5, 1), st.floats(0, 1))
@quick
def test_fast_gae_is_the_vanilla_one(rows, length, chunk, gamma, lambd):
    rewards, values = sequences([rows * length], 0), sequences([rows * length], 1)
    lengths = torch.full((rows,), length)
    fast = gae(rewards, values, lengths, gamma=gamma, lambd=lambd, chunk_size=chunk)
    slow = vanilla_gae(rewards.view(rows, -1), values.view(rows, -1), gamma=gamma, lambd=lambd)
    for ours, expected in zip(fast, slow, strict=True):
        assert torch.allclose(ours.view(rows, -1), expected, atol=1e-9)


def test_chunks_of_one_token_are_refused():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        discounted_sums(torch.zeros(3), torch.tensor([3]), 1.0, chunk_size=1)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=20))
@quick
def test_whitened_values_have_mean_0_and_variance_1(found):
    values = torch.tensor(found, dtype=torch.float64)
    if values.std() > 1e-2:
        white = whiten(values)
        assert white.mean().item() == pytest.approx(0, abs=1e-9)
        assert white.var().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("found", [[], [0.7], [0.7] * 12, [0.1] * 7])
def test_whitening_makes_no_signal_of_equal_values(found):
    assert whiten(torch.tensor(found, dtype=torch.float64)).tolist() == [0.0] * len(found)
