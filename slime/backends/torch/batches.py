"""Rows as requests to a model, and requests in micro-batches.

Invariant: every request is in exactly one micro-batch, whatever the budget. Knows rows and lengths; knows no
model, loss or optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from slime.backends.torch.forest import PackedBatch, Request, distinct_inputs, empty_batch, pack_requests
from slime.backends.torch.ranks import ALONE, Ranks
from slime.config.training_sections import TrainConfig
from slime.errors import ConfigError, DataError, ModelError
from slime.train.batch import TrainSample
from slime.train.deal import Dealing, Flops, deal_rows
from slime.train.flops import shape_of_config
from slime.train.packing import Packing, TreeBatches


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """How requests are put together, and where their tensors go.

    Attributes:
        ranks: those that compute the requests together.
        flops: cost of a row by its length, for balance over the ranks; None gives them equal numbers of rows.
        even_batches: balance the micro-batches of a rank by that cost too.
    """

    packing: Packing
    device: torch.device
    ranks: Ranks = ALONE
    flops: Flops | None = None
    even_batches: bool = True

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        model: Any,
        *,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> MicroBatches:
        """What the flags declare.

        Args:
            model: Hugging Face config of the model, which tells what a row costs.

        Raises:
            ConfigError: a dynamic batch size without a budget.
            ModelError: the model's sizes do not tell what a row costs, by which several ranks would share.
        """
        if config.use_dynamic_batch_size and config.max_tokens_per_gpu is None:
            raise ConfigError("--use-dynamic-batch-size needs a budget", place="--max-tokens-per-gpu")
        packing = Packing(
            rows_per_batch=config.micro_batch_size,
            max_tokens=config.max_tokens_per_gpu if config.use_dynamic_batch_size else None,
            trees=cast(TreeBatches, config.tree_batches),
        )
        flops = _row_flops(model) if config.balance_data and ranks.size > 1 else None
        return cls(packing, device, ranks, flops, config.balance_by_flops)

    def pack(self, requests: Sequence[tuple[int, Request]]) -> Iterator[tuple[list[int], PackedBatch]]:
        """This rank's micro-batches of numbered requests: the numbers of each, and its tensors.

        All ranks are given all requests. They have equally many micro-batches, some of which may be empty.

        Raises:
            DataError: ranks were given different requests.
        """
        rows, _ = distinct_inputs([request for _, request in requests])
        self.ranks.check_same(hash((*rows, *(number for number, _ in requests))), "rows")
        dealing = Dealing(
            ranks=self.ranks.size, packing=self.packing, flops=self.flops, even_batches=self.even_batches
        )
        for found in deal_rows(rows, dealing)[self.ranks.rank]:
            if not found.rows:
                yield [], empty_batch(self.device)
                continue
            members = [requests[i] for i in found.rows]
            batch = pack_requests(
                [request for _, request in members], share_prefixes=found.shared, device=self.device
            )
            yield [number for number, _ in members], batch


def response_request(sample: TrainSample) -> Request:
    """Asks for every response token.

    Raises:
        DataError: the response has no token before it.
    """
    if sample.response_length and not sample.prompt_length:
        raise DataError("the response has no token before it", place=f"sample {sample.index}")
    targets = tuple(range(sample.prompt_length, len(sample.tokens)))
    return Request(sample.tokens, targets, sample.routed_experts)


def loss_request(sample: TrainSample) -> Request:
    """Asks for the tokens that train."""
    offset = sample.prompt_length
    targets = tuple(offset + i for i, flag in enumerate(sample.loss_mask) if flag)
    return Request(sample.tokens, targets, sample.routed_experts)


def _row_flops(config: Any) -> Flops:
    """Cost of a row by its length under a Hugging Face config.

    Raises:
        ModelError: the config's sizes do not tell it.
    """
    try:
        return shape_of_config(config.to_dict()).sample_flops()
    except ModelError as error:
        raise ModelError(
            error.message, place=error.place, remedy="--no-balance-data does without the cost of a row"
        ) from error
