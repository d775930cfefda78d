"""Public name of the data-parallel schedule.

The code is in `slime.train.dp_schedule`; imports without torch.
"""

from slime.train.dp_schedule import build_dp_schedule

__all__ = ["build_dp_schedule"]
