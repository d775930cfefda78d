import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.torch import forest as forest_module
from slime.backends.torch.attention import forest_attention
from slime.backends.torch.forest import Request, pack_requests
from slime.errors import ModelError

rows_st = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12).map(tuple), min_size=1, max_size=10)


def visible_to(batch, position, window=None):
    """Packed positions that a query sees, according to the plan."""
    plan = batch.plan
    for index, block in enumerate(plan.blocks):
        if block.start <= position < block.stop:
            before = [k for i in block.before for k in range(plan.blocks[i].start, plan.blocks[i].stop)]
            keys = [*before, *range(block.start, block.stop)]
            mask = plan.mask(index, window, torch.float32)
            row = position - block.start
            if mask is None:
                return keys[: row + 1]
            return [key for key, value in zip(keys, mask[row].tolist(), strict=True) if value == 0]
    raise AssertionError(position)


@pytest.mark.parametrize(("block", "piece"), [(128, 512), (6, 4), (1, 2)])
@given(rows=rows_st, share=st.booleans())
def test_every_prediction_sees_exactly_its_own_history(block, piece, rows, share):
    saved = forest_module._BLOCK_TOKENS, forest_module._PIECE_TOKENS
    forest_module._BLOCK_TOKENS, forest_module._PIECE_TOKENS = block, piece
    try:
        batch = pack_requests([Request(row, tuple(range(1, len(row)))) for row in rows], share_prefixes=share)
        ids, depth = batch.input_ids[0].tolist(), batch.plan.depth.tolist()
        queries = iter(batch.token_query.tolist())
        for row in rows:
            for target in range(1, len(row)):
                query = next(queries)
                position = batch.hidden_index[batch.query_position[query]].item()
                seen = sorted(visible_to(batch, position), key=depth.__getitem__)
                assert tuple(ids[k] for k in seen) == row[:target]
                assert [depth[k] for k in seen] == list(range(target))
                assert batch.query_target[query].item() == row[target]
                assert len(visible_to(batch, position, window=2)) == min(2, target)
    finally:
        forest_module._BLOCK_TOKENS, forest_module._PIECE_TOKENS = saved


@given(rows_st)
def test_shared_prefixes_and_equal_predictions_are_computed_once(rows):
    batch = pack_requests([Request(row, tuple(range(1, len(row)))) for row in rows])
    inputs = {row[:size] for row in rows for size in range(1, len(row))}
    assert batch.input_ids.shape == (1, len(inputs))
    assert len(batch.hidden_index) == len(inputs)
    assert len(batch.query_target) == len({row[:size] for row in rows for size in range(2, len(row) + 1)})


def test_only_positions_that_predict_something_reach_the_output_layer():
    batch = pack_requests([Request((5, 6, 7, 8, 9), (2, 3))])
    assert batch.input_ids.tolist() == [[5, 6, 7]]
    assert batch.hidden_index.tolist() == [1, 2]


def test_attention_without_a_plan_names_the_model():
    tensors = [torch.zeros(1, 1, 2, 4)] * 3
    with pytest.raises(ModelError, match="Linear does not pass"):
        forest_attention(torch.nn.Linear(1, 1), *tensors)
