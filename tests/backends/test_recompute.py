import pytest
import torch

from slime.backends.torch.recompute import recompute_layers
from slime.errors import ConfigError
from tests.backends.rollouts import gradients, make_trainer
from tests.backends.test_trainer import assert_equal, run, values
from tests.tiny import tiny_model_dir


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3_text"])
def test_gradients_and_weights_are_those_without_it_to_the_bit(tmp_path, arch):
    folder = tiny_model_dir(tmp_path / arch, arch=arch)
    found = []
    for recompute in (False, True):
        trainer = make_trainer(folder, gradient_checkpointing=recompute, micro_batch_size=3)
        run(trainer, range(2))
        found.append((gradients(trainer), values(trainer)))
    assert_equal(found[0][0], found[1][0])
    assert_equal(found[0][1], found[1][1])


def saved_bytes(trainer):
    """Bytes that autograd holds at the end of the forwards of a step."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(trainer, [0])
    return sum(sizes.values())


def test_less_is_kept(tmp_path):
    folder = tiny_model_dir(tmp_path / "m", num_hidden_layers=6)
    plain, recomputed = (
        saved_bytes(make_trainer(folder, gradient_checkpointing=flag, micro_batch_size=6))
        for flag in (False, True)
    )
    assert recomputed < 0.5 * plain


def test_a_model_without_marked_layers_is_refused():
    with pytest.raises(ConfigError, match="--gradient-checkpointing"):
        recompute_layers(torch.nn.Linear(2, 2))
