"""What leaves the trainer: dtypes of engine and checkpoint, names that are not theirs, buckets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import ModelError
from slime.serving.weights.layout import StoredTensor
from slime.serving.weights.outgoing import Outgoing, WireForm, buckets


def stored(**entries):
    return {name: StoredTensor("f", code, shape, 0, 0) for name, (code, shape) in entries.items()}


def dtypes(form, *tensors):
    return [item.dtype for item in form.outgoing(tensors)]


def test_a_checkpoint_of_one_dtype_is_sent_in_the_engines():
    weights = [("a", torch.ones(2)), ("b", torch.ones(3))]
    layout = stored(a=("BF16", (2,)), b=("BF16", (3,)))
    assert dtypes(WireForm(layout, "bfloat16"), *weights) == [torch.bfloat16] * 2
    assert dtypes(WireForm(layout, "float32"), *weights) == [torch.float32] * 2
    assert dtypes(WireForm(layout, "auto"), *weights) == [torch.bfloat16] * 2
    assert dtypes(WireForm(layout, None), *weights) == [torch.bfloat16] * 2
    assert dtypes(WireForm(None, "bfloat16"), *weights) == [torch.bfloat16] * 2
    assert dtypes(WireForm(None, None), *weights) == [torch.float32] * 2


def test_a_checkpoint_of_several_dtypes_keeps_them():
    weights = [("a", torch.ones(2)), ("bias", torch.ones(3))]
    layout = stored(a=("BF16", (2,)), bias=("F32", (3,)))
    assert dtypes(WireForm(layout, "bfloat16"), *weights) == [torch.bfloat16, torch.float32]


def test_codes_and_scales_keep_their_dtypes_and_split_weights_take_the_checkpoints():
    layout = stored(w=("F8_E4M3", (2,)), s=("F32", (1,)), part=("BF16", (2,)))

    def transform(name, tensor):
        yield "w", tensor.to(torch.float8_e4m3fn)
        yield "s", torch.ones(1)
        yield "part", tensor

    form = WireForm(layout, "bfloat16", transform)
    assert dtypes(form, ("whole", torch.ones(2))) == [torch.float8_e4m3fn, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("name", "shape", "said"), [("b", (2,), "no such weight"), ("a", (3,), "shape")])
def test_weights_that_the_engines_do_not_have_are_refused(name, shape, said):
    form = WireForm(stored(a=("F32", (2,))), None)
    with pytest.raises(ModelError, match=said):
        [*form.outgoing([(name, torch.ones(shape))])]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
def test_buckets_keep_order_and_size_and_tell_the_last(sizes, limit):
    items = [Outgoing(str(i), torch.zeros(n, dtype=torch.uint8), torch.uint8) for i, n in enumerate(sizes)]
    found = [*buckets(items, limit)]
    assert [item for bucket, _ in found for item in bucket] == items
    assert all(len(bucket) == 1 or sum(item.nbytes for item in bucket) <= limit for bucket, _ in found)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True] * bool(found)
