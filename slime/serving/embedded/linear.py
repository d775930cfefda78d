"""Linear layers that are fast for the few rows of a decode step.

Invariant: parameters, their names and the result (but for rounding) are those of `torch.nn.Linear`, and
weights are never copied, so they may alias foreign memory. Knows nothing of models beyond their modules.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MANY_ROWS = 48
"""From here on it does not matter that the library packs the weights, most of the cost of a thin product."""
FEW_ROWS = 8
"""Below, the library has kernels of its own for row vectors."""
BLOCK = 32
"""Weight rows of one product of the batch; products of this size are computed without packing."""


class ThinLinear(nn.Linear):
    """`torch.nn.Linear` that computes W x^T as a batch of small products when x has few rows.

    That takes 0.5 to 0.9 of the time. The result is then a transposed view of its memory.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = input.numel() // self.in_features
        block = math.gcd(self.out_features, BLOCK)
        if not (FEW_ROWS <= rows < MANY_ROWS and block >= FEW_ROWS and self.weight.is_contiguous()):
            return F.linear(input, self.weight, self.bias)
        columns = input.reshape(rows, self.in_features).t().contiguous()
        blocks = self.weight.view(-1, block, self.in_features)
        output = torch.bmm(blocks, columns.expand(blocks.shape[0], -1, -1)).view(self.out_features, rows).t()
        if self.bias is not None:
            output += self.bias
        return output.view(*input.shape[:-1], self.out_features)


def thin_linears(model: nn.Module) -> None:
    """Make the plain float32 linear layers of a model thin ones, in place.

    Those directly in an attention layer stay: what reads queries and keys wants their rows contiguous.
    """
    for parent in model.modules():
        if hasattr(parent, "layer_idx"):
            continue
        for child in parent.children():
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                child.__class__ = ThinLinear
