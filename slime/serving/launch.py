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
class Stand:
    """Where an engine, or one machine's part of it, is.

    Attributes:
        host: address that it binds, and under which it is reached.
        port: None takes any free one; so do the others.
        bootstrap_port: where a prefilling engine hands its keys over.
        base_gpu: first of its GPUs among those that it sees; None counts as the plan does.
        node_rank: which part of `nnodes`; the first answers requests.
        meeting: host:port where the parts meet.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    nccl_port: int | None = None
    bootstrap_port: int | None = None
    base_gpu: int | None = None
    node_rank: int = 0
    nnodes: int = 1
    meeting: str | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """What engines have in common.

    Attributes:
        memory_saver: SGLang can give up its memory.
        routed_experts: SGLang tells the experts of each token.
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
    memory_saver: bool = False
    routed_experts: bool = False


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


def start_engine(
    spec: EngineSpec,
    settings: LaunchSettings,
    *,
    stand: Stand | None = None,
    log_file: Path | None = None,
) -> RunningEngine:
    """Start an engine and wait until it answers.

    Args:
        stand: where (default: on this machine, at free ports).
        log_file: default: by its name in the folder of logs.

    Raises:
        ConfigError: a setting that this kind of engine does not have.
        EngineError: it did not start; holds the end of its log.
    """
    stand = stand or Stand(host=settings.host)
    log_file = log_file or settings.log_dir / f"{spec.name.replace('/', '-')}.log"
    process: ServerProcess
    if spec.worker_type == "prefill" and stand.bootstrap_port is None:
        stand = dataclasses.replace(stand, bootstrap_port=free_port(stand.host))
    if settings.kind == "embedded":
        process = EngineProcess(spec.model_path, embedded_config(spec, settings, stand), log_file)
    else:
        process = SGLangProcess(sglang_launch(spec, settings, stand), log_file, python=settings.python)
    return RunningEngine(
        spec=spec,
        process=process,
        endpoint=spec.endpoint(process.url, settings.kind),
        bootstrap_port=stand.bootstrap_port if spec.worker_type == "prefill" else None,
    )


def embedded_config(spec: EngineSpec, settings: LaunchSettings, stand: Stand) -> EngineConfig:
    """The configuration of an embedded engine."""
    return dataclasses.replace(settings.embedded, host=stand.host, port=stand.port, **spec.settings)


def sglang_launch(spec: EngineSpec, settings: LaunchSettings, stand: Stand) -> EngineLaunch:
    """The launch of an SGLang engine, or of one machine's part of it.

    Raises:
        ConfigError: its GPUs do not divide by its pipeline stages.
    """
    bootstrap_port = stand.bootstrap_port
    overrides, stages = sglang_settings(spec, settings.sglang, settings.python, bootstrap_port)
    return EngineLaunch(
        model_path=spec.model_path,
        host=stand.host,
        port=stand.port or free_port(stand.host),
        nccl_port=stand.nccl_port,
        nnodes=stand.nnodes,
        node_rank=stand.node_rank,
        dist_init_addr=stand.meeting,
        memory_saver=settings.memory_saver,
        return_routed_experts=settings.routed_experts,
        seed=settings.seed + spec.ordinal,
        tp_size=spec.num_gpus // stages,
        pp_size=stages,
        # On CPUs it is the number of a NUMA node.
        base_gpu_id=(spec.first_gpu if gpu_present() else 0) if stand.base_gpu is None else stand.base_gpu,
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
