import math

import pytest
import torch

from slime.train.corrections import CorrectionRule, Rejection, Weighting
from slime.train.kl import kl_estimate, kl_type
from slime.train.mismatch import gap_metrics, gap_terms
from slime.train.policy_loss import PolicyLoss, PolicyTokens, policy_losses

CLIPPED = CorrectionRule(weighting=Weighting(mode="clip", low=0.0, high=2.0))


def tokens(log_probs, old, advantages, **more):
    named = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": advantages,
        "entropy": [0.5] * len(old),
    }
    return PolicyTokens(
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in (named | more).items()}
    )


def losses(batch, **terms):
    loss, metrics = policy_losses(batch, PolicyLoss(**terms))
    return loss.tolist(), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -2.56, 1),
        (0.5, 2.0, -1.0, 0),
        (1.5, -2.0, 3.0, 0),
        (0.5, -2.0, 1.6, 1),
        (9.0, -2.0, 6.0, 0),
    ],
)
def test_clip_low_high_and_dual(ratio, advantage, expected, clipped):
    batch = tokens([math.log(ratio)], [0.0], [advantage])
    found, metrics = losses(batch, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert found == pytest.approx([expected])
    assert metrics["pg_clipfrac"].tolist() == [clipped]


def test_entropy_and_kl_terms():
    batch = tokens([-1.0], [-1.0], [0.0], ref_log_probs=[-1.5])
    found, metrics = losses(batch, entropy_coef=0.1, kl_type="k1", kl_coef=0.2)
    assert found == pytest.approx([-0.05 + 0.1])
    assert metrics["kl_loss"].tolist() == [0.5]


def test_truncated_importance_weights_the_policy_term_only():
    batch = tokens([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], rollout_log_probs=[-3.0, -1.0 + math.log(2)])
    found, metrics = losses(batch, correction=CLIPPED, entropy_coef=1.0)
    assert found == pytest.approx([-2.0 - 0.5, -0.5 - 0.5])
    assert metrics["tis"].tolist() == pytest.approx([math.exp(2), 0.5])
    assert metrics["tis_clipfrac"].tolist() == [1, 0]


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    batch = tokens([math.log(3.0), math.log(0.1)], [0.0, 0.0], [1.0, -1.0])
    batch.log_probs.requires_grad_()
    found, metrics = policy_losses(batch, PolicyLoss(surrogate="cispo", clip_low=0.5, clip_high=1.0))
    found.sum().backward()
    assert batch.log_probs.grad.tolist() == pytest.approx([-2.0, 0.5])
    assert found.tolist() == pytest.approx([-2.0 * math.log(3.0), 0.5 * math.log(0.1)])
    assert metrics["pg_clipfrac"].tolist() == [1, 1]


def test_opsm_drops_bad_tokens_of_rollouts_that_are_far_off_policy():
    batch = tokens([-1.0] * 3, [-1.0] * 3, [-1.0, 1.0, -1.0], sequence_log_ratio=[-0.5, -0.5, -0.01])
    found, metrics = losses(batch, opsm_delta=0.1)
    assert found == [0.0, -1.0, 1.0]
    assert metrics["opsm_clipfrac"].tolist() == [1, 0, 0]


def test_a_given_correction_multiplies_the_policy_term_only():
    batch = tokens([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], correction=[0.5, 0.0])
    assert losses(batch, entropy_coef=1.0)[0] == [-0.5 - 0.5, -0.5]


def test_what_needs_the_first_pass_says_so():
    assert PolicyLoss(surrogate="gspo").needs_sequence_ratio
    assert PolicyLoss(opsm_delta=0.1).needs_sequence_ratio
    assert not PolicyLoss(surrogate="cispo").needs_sequence_ratio
    for terms in ({"surrogate": "gspo"}, {"opsm_delta": 0.1}):
        with pytest.raises(ValueError, match="needs the mean log-ratio"):
            losses(tokens([0.0], [0.0], [1.0]), **terms)


def test_icepop_masks_tokens_inside_the_loss():
    batch = tokens([-1.0] * 3, [-1.0] * 3, [1.0] * 3, rollout_log_probs=[-3.0, -1.0, -0.5])
    rule = CorrectionRule(weighting=Weighting(mode="mask", low=0.7, high=5.0))
    found, metrics = losses(batch, correction=rule)
    assert found == pytest.approx([0.0, -1.0, 0.0])
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 1]


def test_a_rule_that_looks_beyond_the_token_is_refused_inside_the_loss():
    batch = tokens([0.0], [0.0], [1.0], rollout_log_probs=[0.0])
    for rule in (
        CorrectionRule(weighting=Weighting(level="sequence")),
        CorrectionRule(weighting=Weighting(normalise=True)),
        CorrectionRule(rejection=Rejection(level="geometric")),
        CorrectionRule(rejection=Rejection(veto=0.1)),
    ):
        with pytest.raises(ValueError, match="settled before packing"):
            losses(batch, correction=rule)
    with pytest.raises(ValueError, match="log-probs of the engine"):
        losses(tokens([0.0], [0.0], [1.0]), correction=CLIPPED)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5), ("low_var_kl", math.exp(-0.5) - 0.5)],
)
def test_kl_estimators(kind, expected):
    found = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), kind_of := kl_type(kind))
    assert kind_of == kind
    assert found.tolist() == pytest.approx([expected])


def test_low_var_kl_is_bounded_and_the_ratio_multiplies():
    far = (torch.tensor([-9.0]), torch.tensor([-1.0]))
    assert kl_estimate(*far, "low_var_kl").item() == 10.0
    assert kl_estimate(*far, "k1", importance_ratio=torch.tensor([0.5])).item() == -4.0
    with pytest.raises(ValueError, match="k9"):
        kl_type("k9")


@pytest.mark.parametrize("terms", [{"correction": CLIPPED}, {"kl_type": "k1"}])
def test_missing_log_probs_are_an_error(terms):
    with pytest.raises(ValueError, match="needs the log-probs"):
        losses(tokens([0.0], [0.0], [1.0]), **terms)


def test_gap_metrics_of_equal_log_probs_are_neutral():
    terms = gap_terms(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]))
    assert terms["abs_diff"].tolist() == [0.0, 0.5]
    equal = gap_metrics({"abs_diff": 0.0, "diff": 0.0, "k3": 0.0}, 0.0)
    assert equal["train_rollout_ppl_ratio"] == 1.0
    assert equal["train_rollout_kl"] == equal["train_rollout_logprob_abs_diff"] == 0.0
