"""Advantages, weights, sequence ratios, corrections and losses together: law 3 on a table of log-probs."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.train.advantages import Estimator, EstimatorName, TokenInputs, token_advantages
from slime.train.aggregate import row_weights
from slime.train.corrections import CorrectionRule, Rejection, Weighting, step_corrections
from slime.train.policy_loss import PolicyLoss, PolicyTokens, policy_losses
from slime.train.sequence import mean_log_ratios
from slime.train.stream import TokenStream
from tests.train.rollouts import cut, joined, rollouts, whole

AGGREGATIONS = [("rollout", None), ("token", None), ("prompt", None), ("constant", 7)]


def gradient(rows, fields, estimator, loss, aggregation):
    """Gradient at the log-prob of each token, from one micro-batch a row."""
    mode, constant = aggregation
    stream, weights = TokenStream.of(rows), row_weights(rows, mode=mode, constant=constant)
    given_inputs = TokenInputs(**{n: fields[n] for n in ("log_probs", "ref_log_probs", "values")})
    advantages = token_advantages(rows, estimator, given_inputs).advantages
    means = mean_log_ratios(rows, fields["log_probs"], fields["old_log_probs"])
    factors, _ = step_corrections(
        rows,
        fields["old_log_probs"],
        weights,
        CorrectionRule(
            weighting=Weighting(level="geometric", mode="clip", low=0.5),
            rejection=Rejection(veto=0.2, low=0.1, high=9.0),
        ),
    )
    found = {}
    for sample in rows:
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        row = {name: torch.tensor(fields[name][sample.index]).double() for name in fields}
        log_probs = row["log_probs"].requires_grad_()
        tokens = PolicyTokens(
            log_probs=log_probs[mask],
            old_log_probs=row["old_log_probs"][mask],
            ref_log_probs=row["ref_log_probs"][mask],
            advantages=advantages[sample.index][mask],
            entropy=torch.zeros(int(mask.sum())),
            sequence_log_ratio=torch.full((int(mask.sum()),), means[sample.rollout_id], dtype=torch.float64),
            correction=factors[sample.index][mask],
        )
        losses, _ = policy_losses(tokens, loss)
        (weights[sample.index] * losses.sum()).backward()
        found[sample.index] = log_probs.grad
    assert len(found) == len(stream.rows)
    return joined(rows, found)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda found: found[0])
@pytest.mark.parametrize("name", get_args(EstimatorName))
@given(data=st.data(), seed=st.integers(0, 999), opsm=st.booleans())
@settings(max_examples=6, deadline=None)
def test_law_3_no_cut_changes_a_gradient(name, aggregation, data, seed, opsm):
    batch = data.draw(rollouts(most=4))
    loss = PolicyLoss(
        surrogate=name if name in ("gspo", "cispo") else "ppo",
        opsm_delta=0.2 if opsm else None,
        kl_type="k3",
        kl_coef=0.1,
    )
    estimator = Estimator(name=name, kl_coef=0.1, gamma=0.9, lambd=0.9)
    one = gradient(*whole(batch), estimator, loss, aggregation)
    other = gradient(*cut(batch, seed), estimator, loss, aggregation)
    assert one.keys() == other.keys()
    for rollout, values in one.items():
        assert other[rollout] == pytest.approx(values, abs=1e-7)
