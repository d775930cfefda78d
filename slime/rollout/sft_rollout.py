"""The rollout function of supervised fine-tuning: conversations of the data, masked, instead of generations.

Invariant: a sample's response goes from the first trained token to the end; its reward is 0. No engine is
asked. Knows `args` and the data source; nothing of the loss.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from slime.errors import ConfigError, DataError
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.groups import flatten
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """One step: the next `rollout_batch_size` conversations, in the groups that the data source gives.

    A prompt is the whole conversation as messages; its tools are in ``metadata["tools"]``.

    Args:
        args: `hf_checkpoint` and `rollout_batch_size`; where set, `loss_mask_type` and
            `apply_chat_template_kwargs`.

    Raises:
        ConfigError: `evaluation`: conversations have no answers to score.
        DataError: a conversation that cannot be trained on; names the sample and the message.
        ModelError: the model has no chat template, or one that no mask can be made for.
    """
    if evaluation:
        raise ConfigError(
            "the rollout function of supervised fine-tuning does not evaluate",
            place="--rollout-function-path",
            remedy="set --eval-function-path slime.rollout.sglang_rollout.generate_rollout, or no evaluation",
        )
    groups = data_source.get_samples(int(args.rollout_batch_size))
    samples = list(flatten(groups))
    for sample in samples:
        _fill(sample, args)
    return RolloutFnTrainOutput(samples=groups, metrics=_metrics(samples))


def _fill(sample: Sample, args: Any) -> None:
    """Tokens, mask and the rest of a sample, from its messages."""
    place = f"sample {sample.index}"
    if isinstance(sample.prompt, str):
        raise DataError(
            "the prompt is a text, not a list of messages",
            place=place,
            remedy="leave --apply-chat-template out, and name the key of the messages with --input-key",
        )
    generator = _generator_for(sample, args)
    try:
        tokens, mask = generator.get_loss_mask(sample.prompt, sample.metadata.get("tools"))
    except DataError as error:
        raise DataError(error.message, place=f"{place}, {error.place}", remedy=error.remedy) from error
    (length,) = generator.get_response_lengths([mask])
    if not length:
        raise DataError(
            "no token trains",
            place=place,
            remedy="leave out conversations with no assistant message whose step_loss_mask is 1",
        )
    sample.tokens, sample.response_length, sample.loss_mask = tokens, length, mask[-length:]
    sample.response = "".join(generator.get_text_from_loss_mask(tokens[-length:], [1] * length))
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED


def _generator_for(sample: Sample, args: Any) -> MultiTurnLossMaskGenerator:
    kwargs = dict(getattr(args, "apply_chat_template_kwargs", None) or {}) | sample.apply_chat_template_kwargs
    kind = getattr(args, "loss_mask_type", None) or "auto"
    return _generator(str(args.hf_checkpoint), kind, json.dumps(kwargs, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _generator(model: str, kind: str, kwargs: str) -> MultiTurnLossMaskGenerator:
    options: Mapping[str, Any] = json.loads(kwargs)
    return MultiTurnLossMaskGenerator(load_tokenizer(model), kind, template_kwargs=options)


def _metrics(samples: list[Sample]) -> dict[str, float]:
    total = sum(len(sample.tokens) for sample in samples)
    trained = sum(sample.effective_response_length for sample in samples)
    return {"rollout/sft/tokens": float(total), "rollout/sft/trained_tokens": float(trained)}
