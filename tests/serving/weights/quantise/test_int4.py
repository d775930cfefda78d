import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.serving.weights.quantise import int4

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def same(a, b):
    return a[0].tolist() == b[0].tolist() and a[1].float().tolist() == b[1].float().tolist()


def codes_of(rows, columns, seed):
    return torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed))


sizes = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9))


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(0, 10**6), st.floats(-12, 6), st.sampled_from(list(DTYPES)))
def test_quantising_what_was_dequantised_gives_the_same_bits(size, seed, exponent, dtype):
    rows, groups, group = size
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * group, generator=generator) * 2.0**exponent
    weight[torch.rand(weight.shape, generator=generator) < 0.3] = 0
    first = int4.quantise(weight, group, DTYPES[dtype])
    again = int4.quantise(int4.dequantise(*first, groups * group), group, DTYPES[dtype])
    assert same(first, again)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-8, 7), min_size=4, max_size=4), st.integers(1, 255), st.integers(-20, 5))
def test_values_of_any_symmetric_checkpoint_survive(codes, significand, exponent):
    """Other programs divide by 7, 7.5 or 8: their largest code is then 7 or -8, and never lies between."""
    if max(codes) < 7 and min(codes) > -8:
        codes = [*codes[:3], -8]
    scale = torch.tensor([[significand * 2.0**exponent]]).bfloat16()
    values = torch.tensor([codes]) * scale.float()
    found = int4.quantise(values, 4, torch.bfloat16)
    assert torch.equal(int4.dequantise(*found, 4), values)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 10**6))
def test_unpacking_undoes_packing(rows, columns, seed):
    codes = codes_of(rows, columns, seed)
    packed = int4.pack(codes)
    assert packed.shape == (rows, -(-columns // 8)) and packed.dtype == torch.int32
    assert torch.equal(int4.unpack(packed, columns), codes)


@pytest.mark.parametrize("columns", [8, 12, 31, 64])
def test_words_are_those_of_compressed_tensors(columns):
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = codes_of(3, columns, 1)
    theirs = library.pack_to_int32(codes.to(torch.int8), 4)
    assert torch.equal(int4.pack(codes), theirs)


def test_the_first_code_lies_in_the_lowest_bits():
    assert int4.pack(torch.tensor([[-8, -7, 0, 0, 0, 0, 0, 0]])).tolist() == [[0x88888810 - 2**32]]


def test_zeros_stay_zeros():
    packed, scales = int4.quantise(torch.zeros(2, 8), 4, torch.bfloat16)
    assert not int4.dequantise(packed, scales, 8).any()
