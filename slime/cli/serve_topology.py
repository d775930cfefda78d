"""`slime serve --config topology.yaml`: all models of a topology, each behind its router, without training.

Invariant: nothing is started before everything is checked; SIGTERM and SIGINT end everything cleanly. A dead
engine leaves its router and is told with the end of its log; a model that lacks what it needs ends the verb.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.signals import terminable
from slime.config.engine_choice import foreign_flags, gpu_present
from slime.config.flags import Flag, flag, flags_of
from slime.config.parse import parse_values
from slime.config.sections import EngineConfig
from slime.config.serving_sections import ServingConfig
from slime.errors import ConfigError, EngineError
from slime.serving.endpoint import EngineKind
from slime.serving.fleet import Death, Fleet, RouterChoice
from slime.serving.launch import LaunchSettings
from slime.serving.router import plan_router, reachable
from slime.serving.topology import ServedModel, Topology
from slime.serving.topology_flags import topology_of

_PROG = "slime serve --config"
_SERVING = (
    "rollout_engine",
    "sglang_python",
    "sglang_config",
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "num_gpus_per_node",
    "sglang_router_ip",
    "sglang_router_port",
    "sglang_router_request_timeout_secs",
)
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is this verb's own."""

    hf_checkpoint: str | None = flag(None, "model folder of models that name none", "str")
    host: str = flag("127.0.0.1", "address that engines and routers listen on", "str")
    seed: int = flag(1234, "seed of the first engine; the others count on", "int", at_least=0)
    log_dir: str | None = flag(None, "folder of the servers' logs (default: runs/serve-<time>)", "str")
    ready_file: str | None = flag(None, "file that gets the addresses as JSON once all are ready", "str")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked command line."""

    options: Options
    serving: ServingConfig
    topology: Topology
    settings: LaunchSettings
    router: dict[str, Any]
    warnings: tuple[str, ...] = ()


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code (130 for one that comes before all are ready).

    Raises:
        ConfigError: topology or flags cannot be run.
        EngineError: a server did not start, or a model has lost what it needs.
    """
    request = parse(argv)
    for text in request.warnings:
        print(f"slime serve: warning: {text}", file=sys.stderr)
    fleet = Fleet(request.topology, request.settings, lambda model: choose_router(model, request))
    is_ready = False
    try:
        with terminable():
            fleet.start()
            _announce(fleet, request.options.ready_file)
            is_ready = True
            while True:
                _bear(fleet, fleet.next_death())
    except KeyboardInterrupt:
        return 0 if is_ready else INTERRUPTED
    finally:
        fleet.stop()


def parse(argv: list[str]) -> Request:
    """The command line, checked.

    Raises:
        ConfigError: topology or flags cannot be run.
    """
    words = ["--sglang-config" + word.removeprefix("--config") if _is_config(word) else word for word in argv]
    rows = _flags()
    foreign = foreign_flags(words, rows, in_run=False)
    parsed = parse_values(words, [*rows, *foreign.usable()], _PROG, foreign.refusals())
    values = parsed.values | {"rollout_engine": foreign.engine}
    names = {item.name for item in dataclasses.fields(ServingConfig)}
    serving = ServingConfig(**{name: value for name, value in values.items() if name in names})
    options = Options(**{item.name: values[item.name] for item in dataclasses.fields(Options)})
    topology, warnings = topology_of(serving, model_path=options.hf_checkpoint, trains=False, in_run=False)
    _check(topology, serving)
    return Request(
        options=options,
        serving=serving,
        topology=topology,
        settings=_settings(values, options, serving, foreign.said("sglang", values, parsed.said), topology),
        router=foreign.said("router", values, parsed.said),
        warnings=tuple(f"{problem.flag}: {problem.message}" for problem in warnings),
    )


def choose_router(model: ServedModel, request: Request) -> RouterChoice:
    """The router before a model: the first one's may run already, or have its port named."""
    serving, is_first = request.serving, model is request.topology.default
    if is_first and serving.sglang_router_ip is not None:
        where = f"{reachable(serving.sglang_router_ip)}:{serving.sglang_router_port}"
        return RouterChoice(running_url=f"http://{where}")
    plan = plan_router(
        model, serving, request.router, engine=request.settings.kind, host=request.options.host
    )
    return RouterChoice(plan=plan, port=serving.sglang_router_port if is_first else None)


def _is_config(word: str) -> bool:
    return word == "--config" or word.startswith("--config=")


def _flags() -> list[Flag]:
    serving = [row for row in flags_of(ServingConfig, "serving") if row.dest in _SERVING]
    engine = flags_of(EngineConfig, "engine", "engine-")
    own = [row for row in engine if row.dest not in ("engine_host", "engine_port")]
    return [*flags_of(Options, "serve"), *serving, *own]


def _check(topology: Topology, serving: ServingConfig) -> None:
    if serving.sglang_router_ip is not None and serving.sglang_router_port is None:
        raise ConfigError("needs --sglang-router-port", place="--sglang-router-ip")
    gpus, here = topology.num_gpus, serving.num_gpus_per_node
    if serving.rollout_engine == "sglang" and gpu_present() and gpus > here:
        raise ConfigError(
            f"the topology takes {gpus} GPUs, and this machine has {here}",
            place=str(serving.sglang_config),
            remedy="`slime serve` spans one machine; say --num-gpus-per-node if it has more",
        )


def _settings(
    values: dict[str, Any],
    options: Options,
    serving: ServingConfig,
    sglang: dict[str, Any],
    topology: Topology,
) -> LaunchSettings:
    given = {
        name.removeprefix("engine_"): value for name, value in values.items() if name.startswith("engine_")
    }
    embedded = EngineConfig(**given)
    if embedded.num_threads is None:
        share = max((os.cpu_count() or 1) // max(topology.num_engines, 1), 1)
        embedded = dataclasses.replace(embedded, num_threads=share)
    kind: EngineKind = "sglang" if serving.rollout_engine == "sglang" else "embedded"
    return LaunchSettings(
        kind=kind,
        log_dir=Path(options.log_dir or f"runs/serve-{time.strftime('%Y%m%d-%H%M%S')}"),
        host=options.host,
        embedded=embedded,
        sglang=sglang,
        python=serving.sglang_python,
        seed=options.seed,
        memory_saver=bool(sglang.get("enable_memory_saver")),
        routed_experts=bool(sglang.get("enable_return_routed_experts")),
    )


def _bear(fleet: Fleet, death: Death) -> None:
    """Go on without an engine that others stand in for.

    Raises:
        EngineError: nobody stands in for it.
    """
    if death.engine is None:
        raise EngineError(death.report, place=death.name)
    spec = death.engine.spec
    print(f"slime serve: {death.name} is gone: {death.report}", file=sys.stderr, flush=True)
    fleet.drop(death.engine)
    if fleet.lacks(spec.model, spec.worker_type):
        raise EngineError(f"{spec.model} has no {spec.worker_type} engine left", place=death.name)


def _announce(fleet: Fleet, ready_file: str | None) -> None:
    models = {model: {"url": url, "engines": _engines(fleet, model)} for model, url in fleet.routers.items()}
    if ready_file is not None:
        partial = Path(f"{ready_file}.partial")
        partial.write_text(json.dumps({"pid": os.getpid(), "models": models}, indent=1), encoding="utf-8")
        partial.replace(ready_file)
    for model, url in fleet.routers.items():
        for engine in fleet.engines:
            if engine.spec.model == model:
                print(f"slime serve: {engine.spec.name} on {engine.endpoint.url}")
        print(f"slime serve: {model} ready on {url}", flush=True)


def _engines(fleet: Fleet, model: str) -> list[dict[str, Any]]:
    return [
        {
            "name": engine.spec.name,
            "url": engine.endpoint.url,
            "worker_type": engine.spec.worker_type,
            "pid": engine.process.pid,
        }
        for engine in fleet.engines
        if engine.spec.model == model
    ]
