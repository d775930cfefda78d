"""Rewards of the quickstart. A reward hook is one function: it gets a `Sample` and returns a number."""

import re
from typing import Any

from slime.utils.types import Sample


async def just_the_number(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1.0 for the right number and nothing else, 0.5 when it ends the answer, else 0.0."""
    text = sample.response.replace("<|im_end|>", "").strip()
    if text == sample.label:
        return 1.0
    return 0.5 * ends_with(text, sample.label)


async def correct(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1.0 when the last number of the answer is the sum."""
    return float(ends_with(sample.response.replace("<|im_end|>", ""), sample.label))


def ends_with(text: str, label: str) -> bool:
    """Whether `label` is the last number in `text`."""
    numbers = re.findall(r"-?\d+", text)
    return bool(numbers) and numbers[-1] == label
