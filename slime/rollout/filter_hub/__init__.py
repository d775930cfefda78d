"""Dynamic filters: which finished groups enter the batch."""

from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)

__all__ = ["DynamicFilterOutput", "call_dynamic_filter", "should_drop_dynamic_filter_output"]
