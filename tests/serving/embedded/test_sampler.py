"""Sampling draws from the distribution it reports, inside the support that was asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.serving.embedded.request import SamplingParams
from slime.serving.embedded.sampler import (
    Filters,
    Row,
    Sampler,
    inverse_cdf,
    sample_filtered,
    uniforms,
)


def row(seed=0, position=0, **params):
    tokens = list(range(position))
    return Row(
        params=SamplingParams(**params),
        seed=seed,
        prompt_length=position,
        tokens=tokens,
        stop_ids=(),
        top_logprobs=0,
    )


def draw(logits, count, **params):
    """`count` tokens from one distribution, one seed each."""
    rows = [row(seed, 7, **params) for seed in range(count)]
    return Sampler(rows).sample(logits.expand(count, -1).clone())


def chi_square(tokens, probabilities):
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vocab", [5, 64, 259, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(vocab, temperature):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    sampled = draw(logits, 20_000, temperature=temperature)
    expected = (logits.double() / temperature).softmax(-1)
    big = expected > 5e-4
    lumped = np.append(expected[big].numpy(), expected[~big].sum().item() + 1e-12)
    place = torch.where(big, big.cumsum(-1) - 1, int(big.sum())).numpy()
    degrees = len(lumped) - 1
    assert chi_square(place[sampled.tokens], lumped) < degrees + 5 * (2 * degrees) ** 0.5
    reported = torch.tensor(sampled.logprobs)
    assert torch.allclose(reported, expected.log()[sampled.tokens].float(), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.integers(2, 3000),
    top_k=st.sampled_from([-1, 1, 3, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
)
def test_samples_stay_inside_the_filters(seed, vocab, top_k, top_p, min_p, spread):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows = [row(seed ^ i, i, **params) for i in range(4)]
    sampled = Sampler(rows).sample(logits.expand(4, -1).clone())
    probs = logits.double().softmax(-1)
    for token in sampled.tokens:
        ahead = probs > probs[token] * (1 + 1e-6)
        assert top_k < 0 or ahead.sum() < top_k
        assert top_p == 1.0 or probs[ahead].sum() < top_p + 1e-5
        assert probs[token] >= min_p * probs.max() * (1 - 1e-5)


def test_nucleus_wider_than_the_first_look_is_still_exact():
    weights, uniform = torch.ones(2, 5000), torch.tensor([[0.25], [0.999]], dtype=torch.float64)
    filters = Filters.of([SamplingParams(top_p=0.9)] * 2)
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    narrow = sample_filtered(weights, total, uniform, filters, width=8)
    wide = sample_filtered(weights, total, uniform, filters, width=5000)
    assert torch.equal(narrow, wide)


def test_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(6, 2000)
    rows = [row(i, i, top_p=0.8 if i % 2 else 1.0, temperature=0.0 if i == 4 else 1.3) for i in range(6)]
    together = Sampler(rows).sample(logits.clone())
    alone = [Sampler([r]).sample(logits[i : i + 1].clone()) for i, r in enumerate(rows)]
    assert together.tokens == [sampled.tokens[0] for sampled in alone]
    assert together.logprobs == pytest.approx([sampled.logprobs[0] for sampled in alone], abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_its_plain_logprob():
    logits = torch.randn(3, 100)
    sampled = Sampler([row(temperature=0.0, top_p=0.5)] * 3).sample(logits.clone())
    assert sampled.tokens == logits.argmax(-1).tolist()
    assert sampled.logprobs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-5)


def test_bias_and_forbidden_stops_count_in_the_logprob():
    logits = torch.zeros(1, 4)
    held = Row(
        params=SamplingParams(min_new_tokens=1, logit_bias={1: 50.0}),
        seed=0,
        prompt_length=2,
        tokens=[0, 0],
        stop_ids=(1, 2),
        top_logprobs=2,
    )
    sampled = Sampler([held]).sample(logits.clone())
    assert sampled.tokens[0] in (0, 3)
    assert sampled.logprobs == pytest.approx([-np.log(2)])
    assert {token for _, token in sampled.top_logprobs[0]} == {0, 3}


@settings(max_examples=30, deadline=None)
@given(vocab=st.integers(1, 700), quantile=st.floats(0, 0.999999), seed=st.integers(0, 1000))
def test_inverse_cdf_finds_the_quantile(vocab, quantile, seed):
    weights = torch.rand(1, vocab, generator=torch.Generator().manual_seed(seed)) + 1e-3
    token, total = inverse_cdf(weights, torch.tensor([[quantile]], dtype=torch.float64))
    cumulative = weights[0].double().cumsum(-1)
    assert total.item() == pytest.approx(cumulative[-1].item())
    target = quantile * total.item()
    assert cumulative[token.item()].item() > target - 1e-6
    assert token.item() == 0 or cumulative[token.item() - 1].item() <= target + 1e-6


def test_uniforms_are_flat_and_uncorrelated_along_both_counters():
    seeds, positions = np.meshgrid(np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.uint64))
    values = uniforms(seeds, positions)
    assert values.min() >= 0 and values.max() < 1
    assert np.unique(values).size == values.size
    for axis in (0, 1):
        a, b = np.delete(values, -1, axis).ravel(), np.delete(values, 0, axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert chi_square((values.ravel() * 20).astype(int), np.full(20, 0.05)) < 50
