"""Starts one engine of a plan on this machine, whichever kind it is.

Invariant: what comes back answers, and is what the plan says. Knows nothing of routers, other machines or
training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.config.engine_choice import gpu_present
from slime.config.passthrough import table_of
from slime.config.sections import EngineConfig
from slime.errors import ConfigError
from slime.serving.embedded.process import EngineProcess
from slime.serving.endpoint import EngineEndpoint, EngineKind
from slime.serving.engine_specs import EngineSpec
from slime.serving.router import free_port
from slime.serving.router_client import Registration
from slime.serving.server_process import ServerProcess
from slime.serving.sglang.command import EngineLaunch
from slime.serving.sglang.process import SGLangProcess


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """What engines have in common.

    Attributes:
        embedded: of embedded engines.
        sglang: flags of SGLang's engines, by field, and the interpreter that has SGLang.
        seed: of the first; the others count on.
    """

    kind: EngineKind
    log_dir: Path
    host: str = "127.0.0.1"
    embedded: EngineConfig = field(default_factory=EngineConfig)
    sglang: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class RunningEngine:
    """An engine that answers.

    Attributes:
        bootstrap_port: where a prefilling one hands its keys over.
    """

    spec: EngineSpec
    process: ServerProcess
    endpoint: EngineEndpoint
    bootstrap_port: int | None = None

    @property
    def registration(self) -> Registration:
        """The engine as its router is told of it."""
        return Registration(
            url=self.endpoint.url,
            worker_type=self.spec.worker_type,
            bootstrap_port=self.bootstrap_port,
        )


def start_engine(spec: EngineSpec, settings: LaunchSettings) -> RunningEngine:
    """Start an engine and wait until it answers.

    Raises:
        ConfigError: a setting that this kind of engine does not have.
        EngineError: it did not start; holds the end of its log.
    """
    log_file = settings.log_dir / f"{spec.name.replace('/', '-')}.log"
    bootstrap_port = free_port(settings.host) if spec.worker_type == "prefill" else None
    process: ServerProcess
    if settings.kind == "embedded":
        process = EngineProcess(spec.model_path, embedded_config(spec, settings), log_file)
    else:
        launch = sglang_launch(spec, settings, bootstrap_port)
        process = SGLangProcess(launch, log_file, python=settings.python)
    return RunningEngine(
        spec=spec,
        process=process,
        endpoint=spec.endpoint(process.url, settings.kind),
        bootstrap_port=bootstrap_port,
    )


def embedded_config(spec: EngineSpec, settings: LaunchSettings) -> EngineConfig:
    """The configuration of an embedded engine; each takes a free port."""
    return dataclasses.replace(settings.embedded, host=settings.host, port=None, **spec.settings)


def sglang_launch(spec: EngineSpec, settings: LaunchSettings, bootstrap_port: int | None) -> EngineLaunch:
    """The launch of an SGLang engine on this machine.

    Raises:
        ConfigError: its GPUs do not divide by its pipeline stages.
    """
    overrides, stages = sglang_settings(spec, settings.sglang, settings.python, bootstrap_port)
    return EngineLaunch(
        model_path=spec.model_path,
        host=settings.host,
        port=free_port(settings.host),
        seed=settings.seed + spec.ordinal,
        tp_size=spec.num_gpus // stages,
        pp_size=stages,
        # On CPUs it is the number of a NUMA node.
        base_gpu_id=spec.first_gpu if gpu_present() else 0,
        flags=settings.sglang,
        overrides=overrides,
    )


def sglang_settings(
    spec: EngineSpec, flags: Mapping[str, Any], python: str | None, bootstrap_port: int | None
) -> tuple[dict[str, Any], int]:
    """What an SGLang engine is told above all flags, and its pipeline stages.

    Args:
        flags: those that the user gave, by field.
        bootstrap_port: where it hands keys over, if it prefills for others.

    Raises:
        ConfigError: its GPUs do not divide by its pipeline stages.
    """
    overrides = spec.settings_for(table_of("sglang", python).by_field)
    if spec.worker_type == "prefill" and bootstrap_port is not None:
        overrides["disaggregation_bootstrap_port"] = bootstrap_port
    stages = int(overrides.get("pp_size") or flags.get("pp_size") or 1)
    if spec.num_gpus % stages:
        raise ConfigError(
            f"{spec.num_gpus} GPUs do not divide into {stages} pipeline stages",
            place=spec.name,
            remedy="another num_gpus_per_engine or pp_size",
        )
    return overrides, stages
