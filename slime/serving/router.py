"""Starts a router before the engines of a model: sglang-router where it is installed, else the one of ours.

Invariant: which router runs, and with which settings, follows from the flags alone and can be told before it
starts. A router that runs already (--sglang-router-ip) is used as found, and never comes here.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slime.config.engine_choice import runs_stock_router
from slime.config.router_section import RouterSettings, router_settings
from slime.config.serving_sections import ServingConfig
from slime.errors import ConfigError
from slime.serving.endpoint import EngineKind
from slime.serving.router_client import Registration, RouterClient, RouterWorker
from slime.serving.server_process import ServerProcess, answers
from slime.serving.topology import ServedModel

__all__ = [
    "Registration",
    "RouterClient",
    "RouterPlan",
    "RouterProcess",
    "RouterWorker",
    "plan_router",
    "start_router",
]

RouterKind: TypeAlias = Literal["sglang", "slime"]
"""sglang-router, or the one that slime brings."""
_STOCK_SCRIPT = Path(__file__).with_name("stock_router.py")
_STOCK_DEFAULTS: Mapping[str, Any] = {
    "policy": "cache_aware",
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "log_level": "warn",
    "disable_circuit_breaker": True,
    "worker_startup_check_interval": 1,
    "shutdown_grace_period_secs": 3,
}
_WATCHED: Mapping[str, Any] = {
    "health_check_endpoint": "/model_info",
    "health_check_interval_secs": 1,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
}
"""Of a router whose engines are replaced when they fail. SGLang's /health generates, so a paused engine would
be taken for a dead one; its other answers end with it."""
_NEEDS_WORKERS = "power_of_two"
"""A policy with which sglang-router refuses to start alone."""


@dataclass(frozen=True, kw_only=True)
class RouterPlan:
    """A router that is to be started.

    Attributes:
        settings: by the names of sglang-router's RouterArgs.
        python: interpreter that it runs under.
    """

    model: str
    kind: RouterKind
    python: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        """How it chooses a worker."""
        return str(self.settings["policy"])

    def with_first(self, workers: Sequence[Registration]) -> RouterPlan:
        """The same, with workers from the first on where it would not start without."""
        policies = {self.settings.get(name) for name in ("policy", "prefill_policy", "decode_policy")}
        if self.kind == "slime" or _NEEDS_WORKERS not in policies:
            return self
        urls: dict[str, list[Any]] = {"regular": [], "prefill": [], "decode": []}
        for worker in workers:
            is_prefill = worker.worker_type == "prefill"
            urls[worker.worker_type].append([worker.url, worker.bootstrap_port] if is_prefill else worker.url)
        first = {
            "worker_urls": urls["regular"],
            "prefill_urls": urls["prefill"],
            "decode_urls": urls["decode"],
        }
        return replace(self, settings=dict(self.settings) | first)

    def command(self, port: int, ready_file: Path) -> list[str]:
        """The words that start it; the router of ours writes its port to the file."""
        settings = dict(self.settings) | {"port": port}
        if self.kind == "slime":
            return [self.python, "-m", "slime.serving.embedded_router", json.dumps(settings), str(ready_file)]
        metrics = {"prometheus_host": "127.0.0.1", "prometheus_port": free_port("127.0.0.1")}
        return [self.python, str(_STOCK_SCRIPT), json.dumps(metrics | settings)]


class RouterProcess(ServerProcess):
    """A router in its own process.

    Attributes:
        plan: what was started.
        client: for its workers.
    """

    def __init__(self, plan: RouterPlan, port: int, log_file: Path, ready_timeout: float) -> None:
        self.plan = plan
        host = reachable(str(plan.settings["host"]))
        ready_file = log_file.with_suffix(".ready")
        ready_file.unlink(missing_ok=True)
        is_ours = plan.kind == "slime"
        super().__init__(
            plan.command(port, ready_file),
            log_file,
            name=f"router of {plan.model}",
            ready=_announced(host, ready_file) if is_ours else answers(f"http://{host}:{port}"),
            ready_timeout=ready_timeout,
        )
        self.client = RouterClient(self.url)


def plan_router(
    model: ServedModel,
    serving: ServingConfig,
    flags: Mapping[str, Any],
    *,
    engine: EngineKind,
    host: str = "127.0.0.1",
) -> RouterPlan:
    """What router comes before the engines of `model`.

    sglang-router runs where it is installed beside SGLang (--sglang-python), the router of ours otherwise.

    Args:
        flags: the `--router-*` flags that were given, by field (`Config.router`).
        host: where it listens.

    Raises:
        ConfigError: a setting that the router does not have, or servers that prefill for others without a
            sglang-router.
    """
    python = serving.sglang_python
    is_stock = runs_stock_router(engine, python)
    if not is_stock and model.is_disaggregated:
        raise ConfigError(
            f"{model.name} has servers that prefill for others, and sglang-router is not installed",
            place=model.place or "--prefill-num-servers",
            remedy="install sglang-router beside SGLang, and name the interpreter with --sglang-python",
        )
    common = {"host": host, "request_timeout_secs": serving.sglang_router_request_timeout_secs}
    watched = dict(_WATCHED) if serving.use_fault_tolerance else {"disable_health_check": True}
    if is_stock:
        own = dict(_STOCK_DEFAULTS) | {"pd_disaggregation": model.is_disaggregated}
    else:
        own = {"policy": RouterSettings().policy}
    settings = common | watched | own | dict(flags)
    if not is_stock:
        router_settings(settings)
    return RouterPlan(
        model=model.name,
        kind="sglang" if is_stock else "slime",
        python=(python if is_stock else None) or sys.executable,
        settings=settings,
    )


def start_router(
    plan: RouterPlan,
    log_file: Path,
    *,
    workers: Sequence[Registration] = (),
    port: int | None = None,
    ready_timeout: float = 120.0,
    find_timeout: float = 120.0,
) -> RouterProcess:
    """Start a router, and wait until it sends requests to all `workers`; others may come and go later.

    Args:
        workers: engines that answer already. sglang-router needs two of them to begin with power_of_two.
        port: where it listens (default: any free port).
        ready_timeout: seconds until it answers.
        find_timeout: seconds until a worker is healthy.

    Raises:
        ConfigError: the port is taken.
        EngineError: it did not start; holds the end of its log.
        DeadlineError: it does not find a worker healthy.
        EngineUnavailableError: a worker is gone.
    """
    host = str(plan.settings["host"])
    if port is not None:
        _check_free(host, port)
    chosen = port or (0 if plan.kind == "slime" else free_port(host))
    with contextlib.ExitStack() as on_failure:
        router = RouterProcess(plan.with_first(workers), chosen, log_file, ready_timeout)
        on_failure.callback(router.stop)
        for worker in workers:
            router.client.register(worker, timeout=find_timeout)
        on_failure.pop_all()
    return router


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.create_server((host, 0), family=_family(host)) as sock:
        port: int = sock.getsockname()[1]
        return port


def reachable(host: str) -> str:
    """The address of this machine, for URLs, at which a server that listens on `host` is reached."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _check_free(host: str, port: int) -> None:
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            place="--sglang-router-port",
            remedy="choose another port; with --sglang-router-ip, the router that runs there is used",
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _announced(host: str, ready_file: Path) -> Callable[[], str | None]:
    def ready() -> str | None:
        return f"http://{host}:{int(ready_file.read_text())}" if ready_file.exists() else None

    return ready
