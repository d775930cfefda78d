"""Settings of the router that slime brings, by the names that sglang-router has for the same things.

They are given as `--router-*` where that router runs; see engine_choice.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.flags import flag, flags_of
from slime.errors import ConfigError

POLICIES = ("consistent_hashing", "power_of_two", "round_robin")


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What the router does with requests and with workers that do not answer."""

    host: str = flag("127.0.0.1", "address to listen on", "str")
    port: int = flag(0, "port; 0 takes a free one", "int", at_least=0, at_most=65535)
    policy: str = flag(
        "consistent_hashing",
        "how a worker is chosen; without a routing key consistent_hashing takes the least loaded one",
        "str",
        choices=POLICIES,
    )
    request_timeout_secs: float = flag(14400.0, "deadline of one request", "float", above=0)
    disable_retries: bool = flag(False, "ask no other worker when one is dead", "switch")
    retry_max_retries: int = flag(5, "tries after the first", "int", at_least=0)
    worker_startup_timeout_secs: float = flag(600.0, "until a new worker must be healthy", "float", above=0)
    disable_health_check: bool = flag(False, "do not ask workers how they are", "switch")
    health_check_endpoint: str = flag("/health", "path that a healthy worker answers", "str")
    health_check_interval_secs: float = flag(5.0, "seconds between two checks", "float", above=0)
    health_check_timeout_secs: float = flag(5.0, "deadline of a check", "float", above=0)
    health_failure_threshold: int = flag(3, "failures in a row that take a worker out", "int", at_least=1)
    health_success_threshold: int = flag(1, "successes in a row that bring it back", "int", at_least=1)

    @property
    def retries(self) -> int:
        """Tries after the first."""
        return 0 if self.disable_retries else self.retry_max_retries


def router_settings(values: Mapping[str, Any]) -> RouterSettings:
    """Settings of a mapping by field.

    Raises:
        ConfigError: one that this router does not have, or a value that is none.
    """
    rows = {row.dest: row for row in flags_of(RouterSettings, "router")}
    checked = {}
    for name, value in values.items():
        place = "--router-" + name.replace("_", "-")
        if name not in rows:
            raise ConfigError(
                "is no setting of the router that slime brings",
                place=place,
                remedy=f"it has {', '.join(sorted(rows))}; sglang-router has more",
            )
        checked[name] = rows[name].check(value, place)
    return dataclasses.replace(RouterSettings(), **checked)
