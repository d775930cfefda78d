import subprocess
import sys

import pytest
import torch

from slime.utils import ppo_utils


def test_law_9_the_module_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import slime.utils.ppo_utils"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_losses_take_the_negative_log_ratio():
    ppo_kl = -torch.tensor([1.5, 0.5, 1.0], dtype=torch.float64).log()
    advantages = torch.tensor([2.0, -2.0, 1.0], dtype=torch.float64)
    losses, clipped = ppo_utils.compute_policy_loss(ppo_kl, advantages, 0.2, 0.28)
    assert losses.tolist() == pytest.approx([-2.56, 1.6, -1.0])
    assert clipped.tolist() == [1, 1, 0]
    log_probs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    losses, clipped = ppo_utils.compute_cispo_loss(ppo_kl, log_probs, advantages, 0.2, 0.28)
    losses.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.28 * 2, 0.8 * 2, -1.0])
    assert clipped.tolist() == [1, 1, 0]


def test_kl_by_name():
    found = ppo_utils.compute_approx_kl(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2", torch.tensor([2.0]))
    assert found.tolist() == [0.25]
    with pytest.raises(ValueError, match="k7"):
        ppo_utils.compute_approx_kl(torch.zeros(1), torch.zeros(1), "k7")


@pytest.mark.parametrize("chunk", [-1, 1, 2, 100])
def test_log_probs_and_entropy_of_logits(chunk):
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([0, 6, 3, 3, 1])
    log_probs, entropy = ppo_utils.calculate_log_probs_and_entropy(
        logits, tokens, with_entropy=True, chunk_size=chunk
    )
    distribution = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(log_probs, distribution.log_prob(tokens), atol=1e-6)
    assert torch.allclose(entropy, distribution.entropy(), atol=1e-6)
    assert ppo_utils.calculate_log_probs_and_entropy(logits, tokens)[1] is None


def test_masked_logits_leave_the_entropy_finite():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    log_probs, entropy = ppo_utils.calculate_log_probs_and_entropy(
        logits, torch.tensor([0]), with_entropy=True
    )
    assert entropy.tolist() == pytest.approx([-log_probs.item()])
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_log_probs_of_nothing_and_of_split_vocabularies():
    log_probs, _ = ppo_utils.calculate_log_probs_and_entropy(
        torch.zeros(0, 7), torch.zeros(0, dtype=torch.long)
    )
    assert len(log_probs) == 0
    with pytest.raises(ValueError, match="2 rows of logits for 1 tokens"):
        ppo_utils.calculate_log_probs_and_entropy(torch.zeros(2, 7), torch.zeros(1, dtype=torch.long))

    class TwoRanks:
        def size(self):
            return 2

    with pytest.raises(ValueError, match="over 2 ranks"):
        ppo_utils.calculate_log_probs_and_entropy(
            torch.zeros(1, 7), torch.zeros(1).long(), tp_group=TwoRanks()
        )


def test_chunked_scans_of_rows_equal_the_loop():
    rewards, values = torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(0)).unbind(0)
    slow = ppo_utils.vanilla_gae(rewards, values, 0.99, 0.95)
    fast = ppo_utils.chunked_gae(rewards, values, 0.99, 0.95, chunk_size=32)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(slow, fast, strict=True))
    returns = ppo_utils.chunked_discounted_returns(rewards, 0.9)
    zeros = torch.zeros_like(values)
    assert torch.allclose(returns, ppo_utils.vanilla_gae(rewards, zeros, 0.9, 1.0)[0], atol=1e-4)
    assert torch.allclose(ppo_utils.chunked_discounted_returns(rewards[0], 0.9), returns[0])


def test_reinforce_plus_plus_returns_pass_over_tool_tokens():
    kl = [torch.tensor([0.0, 9.0, 1.0, 9.0]), torch.tensor([5.0])]
    masks = [torch.tensor([1, 0, 1, 0]), torch.tensor([0])]
    found = ppo_utils.get_reinforce_plus_plus_returns(torch.tensor([1.0, 3.0]), kl, masks, 0.1, 0.5)
    assert found[0].tolist() == pytest.approx([0.45, 0.0, 0.9, 0.0])
    assert found[1].tolist() == [0.0]
