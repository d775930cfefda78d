"""Rows as requests to a model, and requests in micro-batches.

Invariant: every request is in exactly one micro-batch, whatever the budget. Knows rows and lengths; knows no
model, loss or optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from slime.backends.torch.forest import PackedBatch, Request, input_tokens, pack_requests
from slime.config.sections import TrainConfig
from slime.errors import ConfigError, DataError
from slime.train.batch import TrainSample
from slime.train.packing import pack_rows, pack_tokens


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """How requests are put together.

    Attributes:
        budget: tokens of a micro-batch, or None where it has a fixed number of rows.
        rows: that number.
        share_prefixes: compute a common prefix of the rows of a micro-batch once.
    """

    budget: int | None
    rows: int
    share_prefixes: bool
    device: torch.device

    @classmethod
    def of(cls, config: TrainConfig, *, share_prefixes: bool, device: torch.device) -> MicroBatches:
        """What the flags declare.

        Raises:
            ConfigError: a dynamic batch size without a budget.
        """
        if config.use_dynamic_batch_size and config.max_tokens_per_gpu is None:
            raise ConfigError("--use-dynamic-batch-size needs a budget", place="--max-tokens-per-gpu")
        budget = config.max_tokens_per_gpu if config.use_dynamic_batch_size else None
        return cls(budget, config.micro_batch_size, share_prefixes, device)

    def pack(self, requests: Sequence[tuple[int, Request]]) -> Iterator[tuple[list[int], PackedBatch]]:
        """Micro-batches of numbered requests: the numbers of each, and its tensors."""
        rows = [input_tokens(request) for _, request in requests]
        if self.budget is not None:
            packs = pack_tokens(rows, max_tokens=self.budget, share_prefixes=self.share_prefixes)
        else:
            packs = pack_rows(rows, rows_per_batch=self.rows)
        for pack in packs:
            members = [requests[i] for i in pack]
            batch = pack_requests(
                [request for _, request in members], share_prefixes=self.share_prefixes, device=self.device
            )
            yield [number for number, _ in members], batch


def response_request(sample: TrainSample) -> Request:
    """Asks for every response token.

    Raises:
        DataError: the response has no token before it.
    """
    if sample.response_length and not sample.prompt_length:
        raise DataError("the response has no token before it", place=f"sample {sample.index}")
    return Request(sample.tokens, tuple(range(sample.prompt_length, len(sample.tokens))))


def loss_request(sample: TrainSample) -> Request:
    """Asks for the tokens that train."""
    offset = sample.prompt_length
    return Request(sample.tokens, tuple(offset + i for i, flag in enumerate(sample.loss_mask) if flag))
