"""Rewards of the quickstart. A reward hook is one function: it gets a `Sample` and returns a number."""

import re
from typing import Any

from slime.utils.types import Sample


async def just_the_number(args: Any, sample: Sample, **kwargs: Any) -> float:
    """0.0 for a wrong number; a right one counts the less, the more words stand around it: 1.0 for ``7``."""
    text = answer(sample)
    return is_right(text, sample.label) / max(len(text.split()), 1)


async def correct(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1.0 when the last number of the answer is the sum, whatever stands around it."""
    return float(is_right(answer(sample), sample.label))


async def exact(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1.0 when the answer is the sum and nothing else."""
    return float(answer(sample) == sample.label)


def answer(sample: Sample) -> str:
    """The text of the response without the end-of-turn token."""
    return sample.response.replace("<|im_end|>", "").strip()


def is_right(text: str, label: str | None) -> bool:
    """Whether `label` is the last number in `text`."""
    numbers = re.findall(r"-?\d+", text)
    return bool(numbers) and numbers[-1] == label
