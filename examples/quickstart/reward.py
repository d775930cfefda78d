"""The reward of the quickstart. A reward hook is one function: it gets a `Sample` and returns a number."""

from typing import Any

from slime.utils.types import Sample


async def just_the_number(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1.0 when the answer is the right number and nothing else."""
    return float(is_just(sample.response, sample.label))


def is_just(response: str, label: str | None) -> bool:
    """Whether the response, without its end-of-turn token, is the label."""
    return response.replace("<|im_end|>", "").strip() == label
