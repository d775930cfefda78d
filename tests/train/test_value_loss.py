import pytest
import torch

from slime.train.value_loss import explained_variance, value_losses


@pytest.mark.parametrize(
    ("value", "old", "target", "expected", "clipped"),
    [
        (1.0, 1.0, 3.0, 4.0, 0),
        (1.5, 1.0, 3.0, (1.2 - 3) ** 2, 1),
        (0.5, 1.0, 3.0, 2.5**2, 0),
        (2.0, 1.0, 1.0, 1.0, 0),
    ],
)
def test_the_worse_of_both_values_counts(value, old, target, expected, clipped):
    values = torch.tensor([value], requires_grad=True)
    loss, metrics = value_losses(values, torch.tensor([old]), torch.tensor([target]), clip=0.2)
    assert loss.tolist() == pytest.approx([expected])
    assert metrics["value_clipfrac"].tolist() == [clipped]
    loss.sum().backward()
    assert (values.grad.item() == 0) == bool(clipped)
    assert not metrics["value_loss"].requires_grad


def test_explained_variance_is_one_for_the_returns_and_zero_for_a_constant():
    returns = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full_like(returns, 0.7), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) < 0
    assert explained_variance(returns, torch.ones_like(returns)) == 0.0
    assert explained_variance(returns[:0], returns[:0]) == 0.0
