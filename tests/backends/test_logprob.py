import pytest
import torch

from slime.backends.torch.logprob import Head, LogitOptions, token_log_probs

POSITIONS = torch.tensor([0, 0, 1, 3, 3, 4, 6])
TARGETS = torch.tensor([3, 5, 0, 1, 2, 9, 4])


def inputs(bias):
    torch.manual_seed(0)
    hidden = torch.randn(7, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    return hidden, weight, torch.randn(11, requires_grad=True) if bias else None


def plain(hidden, head, temperature):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[POSITIONS, TARGETS], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.5, None), (True, 2.0, 3.0)]
)
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
def test_values_and_gradients_equal_those_of_full_logits(chunk, bias, scale, softcap, entropy_weight):
    results = []
    for fused in (True, False):
        hidden, weight, offset = inputs(bias)
        head = Head(weight, offset, scale, softcap)
        if fused:
            options = LogitOptions(1.3, chunk, torch.float32)
            log_probs, entropy = token_log_probs(hidden, head, POSITIONS, TARGETS, options)
        else:
            log_probs, entropy = plain(hidden, head, 1.3)
        factors = torch.linspace(-1, 1, len(POSITIONS))
        loss = (log_probs * factors).sum()
        if entropy_weight:
            loss = loss + entropy_weight * (entropy * torch.linspace(0, 1, 7)).sum()
        loss.backward()
        grads = [hidden.grad, weight.grad] + ([offset.grad] if bias else [])
        results.append([log_probs.detach(), entropy.detach(), *grads])
    for fused_value, plain_value in zip(*results, strict=True):
        torch.testing.assert_close(fused_value, plain_value, rtol=2e-5, atol=2e-6)


def test_bfloat16_products_stay_close():
    hidden, weight, _ = inputs(False)
    options = LogitOptions(1.0, 4, torch.bfloat16)
    log_probs, entropy = token_log_probs(hidden, Head(weight), POSITIONS, TARGETS, options)
    log_probs.sum().backward()
    assert log_probs.dtype == entropy.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(log_probs, plain(hidden, Head(weight), 1.0)[0], rtol=0.05, atol=0.1)
