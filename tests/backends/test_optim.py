import math

import pytest
import torch

from slime.backends.torch.optim import Optimizer, Schedule, check_offload
from slime.config.training_sections import TrainConfig
from slime.errors import ConfigError, NonFiniteGradientError


def optimizer(**config):
    torch.manual_seed(0)
    parameters = {"w": torch.nn.Parameter(torch.randn(3, 2)), "norm": torch.nn.Parameter(torch.ones(3))}
    return parameters, Optimizer(parameters, TrainConfig(**({"lr": 0.1} | config)), total_steps=10)


def test_warm_up_then_cosine_to_the_floor():
    schedule = Schedule(peak=1.0, floor=0.1, style="cosine", warmup=2, decay_steps=6)
    rates = [schedule.rate(step) for step in range(8)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[4] == pytest.approx(0.55)
    assert rates[6:] == pytest.approx([0.1, 0.1])
    assert Schedule(peak=1.0, floor=0.0, style="constant", warmup=0, decay_steps=5).rate(99) == 1.0


def test_weights_change_in_place_and_vectors_do_not_decay():
    parameters, adamw = optimizer(weight_decay=0.5)
    storage = {name: p.data_ptr() for name, p in parameters.items()}
    before = parameters["w"].detach().clone()
    outcome = adamw.step()
    assert outcome.grad_norm == 0.0
    torch.testing.assert_close(parameters["w"].detach(), before * (1 - 0.1 * 0.5))
    assert torch.equal(parameters["norm"], torch.ones(3))
    assert storage == {name: p.data_ptr() for name, p in parameters.items()}


def test_clipping_bounds_the_global_norm():
    parameters, adamw = optimizer(clip_grad=1.0)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    assert adamw.step().grad_norm == pytest.approx(6.0)
    assert math.sqrt(sum(p.grad.square().sum().item() for p in parameters.values())) == pytest.approx(1.0)


def test_steps_with_infinite_gradients_are_skipped_and_then_fatal():
    parameters, adamw = optimizer()
    before = parameters["w"].detach().clone()
    for _ in range(2):
        parameters["w"].grad = torch.full_like(before, math.inf)
        assert adamw.step().skipped
    assert torch.equal(parameters["w"], before)
    assert adamw.steps == 0
    with pytest.raises(NonFiniteGradientError, match="3 steps in a row"):
        adamw.step()


def test_offloaded_steps_are_the_same_to_the_bit_and_keep_the_storage():
    found = []
    for offload in (False, True):
        parameters, adamw = optimizer(optimizer_cpu_offload=offload)
        storage = {name: p.data_ptr() for name, p in parameters.items()}
        for step in range(4):
            for parameter in parameters.values():
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1)) + 0.01 * parameter.detach()
            adamw.step()
            adamw.zero_grad()
            if step == 1:
                state = {name: tensor.clone() for name, tensor in adamw.state_tensors().items()}
                adamw.load_state(state, steps=2, moment_steps=2)
        assert storage == {name: p.data_ptr() for name, p in parameters.items()}
        assert all(parameter.grad is None for parameter in parameters.values())
        found.append(({name: p.detach() for name, p in parameters.items()}, adamw.state_tensors()))
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_offload_is_refused_where_it_cannot_help():
    config = TrainConfig(optimizer_cpu_offload=True)
    check_offload(config, torch.device("cuda"), 1)
    check_offload(TrainConfig(), torch.device("cpu"), 4)
    for device, ranks in (("cpu", 1), ("cuda", 2)):
        with pytest.raises(ConfigError, match="--optimizer-cpu-offload"):
            check_offload(config, torch.device(device), ranks)
