"""Start-up check: engine and trainer must give the same log-probs to the same tokens.

In float32 the gap of one model in two places is rounding (1e-5); anything larger means that they do not run
the same model, template or temperature, and training on such log-probs would be wrong without a sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.errors import MismatchError
from slime.train.batch import TrainSample

MAX_GAP, MEAN_GAP = 1e-3, 1e-4
"""Bounds of the absolute log-prob difference where both sides compute in float32."""


def check_log_probs(
    samples: Sequence[TrainSample], trainer_log_probs: Sequence[Sequence[float]], precisions: set[str]
) -> str:
    """Compare the engine's log-probs on `samples` with the trainer's; returns a line that tells the gap.

    Args:
        precisions: what the two sides compute in.

    Raises:
        MismatchError: above the bounds with both sides in float32.
    """
    gaps = [
        (abs(ours - theirs), sample.index, position)
        for sample, values in zip(samples, trainer_log_probs, strict=True)
        for position, (ours, theirs) in enumerate(zip(values, sample.rollout_log_probs or (), strict=True))
    ]
    if not gaps:
        raise MismatchError("the engine generated no token to compare", place="start-up check")
    worst, mean = max(gaps), sum(gap for gap, _, _ in gaps) / len(gaps)
    facts = f"log-prob gap engine - trainer over {len(gaps)} tokens: max {worst[0]:.1e}, mean {mean:.1e}"
    if worst[0] <= MAX_GAP and mean <= MEAN_GAP:
        return f"start-up check: {facts}"
    if "bfloat16" in precisions:
        return f"warning: start-up check: {facts}; bfloat16 rounds so. --use-tis corrects for it"
    raise MismatchError(
        f"{facts}; worst at response token {worst[2]} of probe {worst[1]}",
        place="start-up check",
        remedy="engine and trainer must load the same --hf-checkpoint; a custom model or attention "
        "that they run differently shows here too. --no-startup-check goes on regardless",
    )
