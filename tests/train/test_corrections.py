import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import DataError
from slime.train.aggregate import row_weights
from slime.train.corrections import (
    ICEPOP,
    CorrectionRule,
    Rejection,
    Weighting,
    correction,
    step_corrections,
)
from tests.train.rollouts import cut, joined, rollouts, whole
from tests.train.rows import row

quick = settings(max_examples=20, deadline=None)
IDS = torch.tensor([0, 0, 1, 1, 1])
RATIOS = [0.5, 3.0, 1.0, 2.0, 0.25]


def factors(weighting=None, rejection=None, ratios=RATIOS, ids=IDS):
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    rule = CorrectionRule(weighting=weighting, rejection=rejection)
    return correction(log_ratio, ids, rule).factors.tolist()


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [0.5, 2.0, 1.0, 2.0, 0.25]),
        ("token", "clip", [0.6, 2.0, 1.0, 2.0, 0.6]),
        ("token", "mask", [0.0, 0.0, 1.0, 2.0, 0.0]),
        ("sequence", "truncate", [1.5, 1.5, 0.5, 0.5, 0.5]),
        ("sequence", "clip", [1.5, 1.5, 0.6, 0.6, 0.6]),
        ("sequence", "mask", [1.5, 1.5, 0.0, 0.0, 0.0]),
        ("geometric", "clip", [1.5**0.5] * 2 + [0.5 ** (1 / 3)] * 3),
    ],
)
def test_levels_and_modes(level, mode, expected):
    found = factors(Weighting(level=level, mode=mode, low=0.6, high=2.0))
    assert found == pytest.approx(expected)


def test_icepop_keeps_the_ratio_only_inside_its_bounds():
    assert factors(ICEPOP, ratios=[0.4, 0.5, 4.9, 5.1, 1.0]) == pytest.approx([0.0, 0.5, 4.9, 0.0, 1.0])


def test_rejection_drops_tokens_or_whole_rollouts():
    assert factors(rejection=Rejection(low=0.5, high=2.5)) == [1, 0, 1, 1, 0]
    assert factors(rejection=Rejection(level="sequence", low=0.6, high=2)) == [1, 1, 0, 0, 0]
    assert factors(rejection=Rejection(level="geometric", low=0.1, high=1.1)) == [0, 0, 1, 1, 1]


def test_a_veto_takes_the_rollout_of_the_token():
    open_bounds = Rejection(low=0.0, high=math.inf, veto=0.3)
    assert factors(rejection=open_bounds) == [1, 1, 0, 0, 0]
    found = correction(torch.tensor(RATIOS).log(), IDS, CorrectionRule(rejection=open_bounds)).metrics
    assert found["veto_frac"].tolist() == [0, 0, 1, 1, 1]
    assert found["rs_frac"].tolist() == [0] * 5


def test_normalised_weights_have_mean_1_over_tokens_or_rollouts():
    tokens = factors(Weighting(mode="truncate", high=2.0, normalise=True))
    assert sum(tokens) / 5 == pytest.approx(1)
    assert tokens[1] == pytest.approx(2.0 / (5.75 / 5))
    assert factors(Weighting(level="sequence", normalise=True)) == pytest.approx([1.5, 1.5, 0.5, 0.5, 0.5])
    nothing = Weighting(mode="mask", low=50.0, high=60.0, normalise=True)
    assert factors(nothing) == [0.0] * 5


def test_metrics_say_what_the_bounds_did():
    found = correction(torch.tensor(RATIOS).log(), IDS, CorrectionRule(weighting=Weighting(high=2.0))).metrics
    assert found["tis"].tolist() == pytest.approx(RATIOS)
    assert found["tis_clipfrac"].tolist() == [0, 1, 0, 0, 0]
    assert found["tis_abs"].tolist() == pytest.approx([0.5, 2.0, 0.0, 1.0, 0.75])


def test_long_rollouts_stay_finite_and_no_gradient_flows():
    log_ratio = torch.full((4000,), 1.0, requires_grad=True)
    weighting = Weighting(level="sequence", mode="truncate", high=math.inf)
    rule = CorrectionRule(weighting=weighting)
    found = correction(log_ratio, torch.zeros(4000, dtype=torch.long), rule).factors
    assert found.isfinite().all()
    assert not found.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(rollouts(), st.integers(0, 999))
@quick
def test_law_3_neither_cuts_nor_order_change_a_factor(level, batch, seed):
    def run(rows, fields):
        return step_corrections(
            rows,
            fields["old_log_probs"],
            row_weights(rows),
            CorrectionRule(
                weighting=Weighting(level=level, mode="clip", low=0.5, normalise=True),
                rejection=Rejection(level=level, low=0.3, high=3.0, veto=0.2),
            ),
        )

    (one, metrics), (other, piece_metrics) = run(*(a := whole(batch))), run(*(b := cut(batch, seed)))
    assert joined(a[0], one) == joined(b[0], other)
    assert piece_metrics == pytest.approx(metrics)


def test_steps_without_tokens_and_missing_engine_log_probs():
    empty = [row(0, mask=(0,))]
    found, metrics = step_corrections(empty, {}, row_weights(empty), CorrectionRule(weighting=ICEPOP))
    assert found[0].tolist() == [0.0]
    assert metrics == {}
    with pytest.raises(DataError, match=r"rollout 0, sample 0: engine log-probs are missing"):
        step_corrections([row(0)], {0: [0.0, 0.0]}, {0: 1.0}, CorrectionRule(weighting=ICEPOP))
