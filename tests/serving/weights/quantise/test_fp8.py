import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.serving.weights.quantise import fp8

E4M3 = torch.float8_e4m3fn
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bits(tensor):
    return tensor.view(torch.uint8).tolist()


def matrix(shape, seed, scale, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * scale
    weight[torch.rand(shape, generator=generator) < 0.1] = 0
    return weight.to(dtype)


shapes = st.tuples(st.integers(1, 21), st.integers(1, 21))
blocks = st.tuples(st.integers(1, 9), st.integers(1, 9))
scales = st.floats(-40, 30).map(lambda exponent: 2.0**exponent)


@settings(max_examples=150, deadline=None)
@given(shapes, blocks, st.integers(0, 10**6), scales, st.sampled_from(["float32", "bfloat16"]), st.booleans())
def test_quantising_what_was_dequantised_gives_the_same_bits(shape, block, seed, scale, dtype, power_of_two):
    weight = matrix(shape, seed, scale, DTYPES[dtype])
    options = {"scale_dtype": torch.float32 if power_of_two else DTYPES[dtype], "power_of_two": power_of_two}
    codes, found = fp8.quantise(weight, block, **options)
    again = fp8.quantise(fp8.dequantise(codes, found, block), block, **options)
    assert (bits(again[0]), bits(again[1])) == (bits(codes), bits(found))


@settings(max_examples=100, deadline=None)
@given(shapes, blocks, st.integers(0, 10**6))
def test_each_weight_is_within_half_a_step_of_its_code(shape, block, seed):
    weight = matrix(shape, seed, 1.0)
    codes, found = fp8.quantise(weight, block, scale_dtype=torch.float32)
    back = fp8.dequantise(codes, found, block)
    largest = torch.zeros(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            top, left = i // block[0] * block[0], j // block[1] * block[1]
            largest[i, j] = weight[top : top + block[0], left : left + block[1]].abs().max()
    assert bool(((back - weight).abs() <= weight.abs() / 16 + largest / 448 * 2**-9).all())


def test_powers_of_two_survive_bfloat16():
    weight = matrix((40, 24), 3, 0.02)
    codes, found = fp8.quantise(weight, (16, 16), scale_dtype=torch.float32, power_of_two=True)
    assert all(math.frexp(value)[0] == 0.5 for value in found.flatten().tolist())
    back = fp8.dequantise(codes, found, (16, 16)).bfloat16()
    again = fp8.quantise(back, (16, 16), scale_dtype=torch.float32, power_of_two=True)
    assert (bits(again[0]), bits(again[1])) == (bits(codes), bits(found))


def test_codes_survive_bfloat16_whatever_their_scale():
    weight = matrix((256, 128), 5, 0.02)
    codes, found = fp8.quantise(weight, (128, 128), scale_dtype=torch.float32)
    back = fp8.dequantise(codes, found, (128, 128)).bfloat16()
    again, others = fp8.quantise(back, (128, 128), scale_dtype=torch.float32)
    assert bits(again) == bits(codes)
    assert torch.allclose(others, found, rtol=2**-8)


def test_codes_of_a_foreign_scale_survive():
    """Scales of any 24 bits, as other programs write them, come back within two parts in a million."""
    codes = torch.arange(0, 256, dtype=torch.uint8).view(E4M3).float().nan_to_num(0.0).to(E4M3).view(16, 16)
    for seed in range(20):
        scale = torch.rand(1, 1, generator=torch.Generator().manual_seed(seed)) + 0.5
        again, found = fp8.quantise(
            fp8.dequantise(codes, scale, (16, 16)), (16, 16), scale_dtype=torch.float32
        )
        assert torch.equal(again.float(), codes.float())
        assert torch.allclose(found, scale, rtol=2e-6)


def test_zeros_stay_zeros():
    codes, found = fp8.quantise(torch.zeros(3, 5), (2, 2), scale_dtype=torch.float32)
    assert not fp8.dequantise(codes, found, (2, 2)).any()
    assert found.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-130, 2.0**100, 3e38])
def test_the_ends_of_float32_are_held(largest):
    weight = torch.tensor([[largest, -largest / 2, 0.0]])
    codes, found = fp8.quantise(weight, (1, 3), scale_dtype=torch.float32)
    back = fp8.dequantise(codes, found, (1, 3))
    assert bool(back.isfinite().all())
    assert torch.allclose(back, weight, rtol=0.07, atol=2.0**-135)
