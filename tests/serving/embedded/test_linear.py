"""Thin linear layers give what plain ones give, at any number of rows, and stay views of their weights."""

import pytest
import torch
from torch import nn

from slime.serving.embedded.linear import ThinLinear, thin_linears


def thin(*sizes, bias=False):
    layer = nn.Linear(*sizes, bias=bias).requires_grad_(False)
    thin_linears(nn.ModuleList([layer]))
    return layer


@pytest.mark.parametrize("rows", [1, 7, 8, 16, 47, 48])
@pytest.mark.parametrize("outputs", [48, 259, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_those_of_a_plain_linear(rows, outputs, bias):
    layer = thin(24, outputs, bias=bias)
    x = torch.randn(1, rows, 24)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert type(layer) is ThinLinear
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x.transpose(0, 1)), expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_a_weight_that_is_swapped_or_strided_is_used_as_it_is():
    layer, x = thin(24, 64), torch.randn(16, 24)
    for weight in (torch.randn(64, 24), torch.randn(24, 64).t()):
        layer.weight.data = weight
        torch.testing.assert_close(layer(x), x @ weight.t(), atol=1e-5, rtol=1e-5)


def test_only_plain_float32_layers_outside_attention_are_changed():
    class Attention(nn.Module):
        layer_idx = 0

        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(8, 32)

    class Special(nn.Linear):
        pass

    parts = nn.ModuleList([Attention(), Special(8, 32), nn.Linear(8, 32).bfloat16(), nn.Linear(8, 32)])
    thin_linears(parts)
    assert [type(part) for part in parts] == [Attention, Special, nn.Linear, ThinLinear]
    assert type(parts[0].q_proj) is nn.Linear
