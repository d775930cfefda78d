"""Both sides of a collective: whatever ends one of them is told."""

import pytest

from slime.serving.weights.meeting import in_thread


def test_an_error_of_any_kind_on_this_side_is_told():
    def work():
        raise ValueError("no such dtype")

    with pytest.raises(ValueError, match="no such dtype"):
        in_thread(work, "test").result(timeout=10)
