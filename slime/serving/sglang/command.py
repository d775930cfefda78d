"""The command line of one SGLang process: what slime decides, what a CPU needs, what the user said.

Invariant: the user's flags win over defaults, never over what slime decides; a topology's overrides win over
all. A default of a field that the installed version lacks is left out. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.engine_choice import gpu_present
from slime.config.passthrough import ForeignTable

_DEFAULTS = {"enable_draft_weights_cpu_backup": True, "enable_metrics": True}
_OF_MEMORY_SAVER = {"enable_weights_cpu_backup": True}
"""Else SGLang forgets weights that it releases, also those that no update sends again: of a frozen model, the
base below adapters, and whatever of a checkpoint the trainer does not train."""
_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.2,
    "sleep_on_idle": True,
}
"""Else SGLang looks for kernels that no CPU build has, and an idle scheduler spins."""


@dataclass(frozen=True, kw_only=True)
class EngineLaunch:
    """One engine, or one node's part of it.

    Attributes:
        nnodes: machines that the engine spans; `dist_init_addr` is where they meet, host:port.
        base_gpu_id: first of its GPUs on this machine.
        flags: SGLang's fields as the user gave them (``--sglang-...``).
        overrides: fields of a group of a topology.
    """

    model_path: str
    host: str
    port: int
    seed: int
    tp_size: int = 1
    pp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    nccl_port: int | None = None
    base_gpu_id: int = 0
    memory_saver: bool = False
    return_routed_experts: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def words(self, table: ForeignTable) -> list[str]:
        """Arguments of ``sglang.launch_server`` as installed.

        Raises:
            ConfigError: an override names no field of this version, or has not its type.
        """
        defaults = _DEFAULTS | ({} if gpu_present() else _ON_CPU)
        defaults |= _OF_MEMORY_SAVER if self.memory_saver else {}
        known = {name: value for name, value in defaults.items() if name in table.by_field}
        checked = ((name, table.check(name, value, "overrides")) for name, value in self.overrides.items())
        overrides = {name.replace("-", "_"): value for name, value in checked}
        return table.words(known | dict(self.flags) | self._decided() | overrides)

    def environment(self, table: ForeignTable) -> dict[str, str]:
        """Variables that the process needs besides its own environment."""
        if "grpc_port" in table.by_field:
            return {}
        # Versions without that flag add 10000 to the port for a server that they do not start, and refuse
        # to start when the sum is no port.
        return {"SGLANG_GRPC_PORT": str(self.port)}

    def _decided(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "host": self.host,
            "port": self.port,
            "random_seed": self.seed,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "dist_init_addr": self.dist_init_addr,
            "nccl_port": self.nccl_port,
            "base_gpu_id": self.base_gpu_id,
            "trust_remote_code": True,
            "skip_server_warmup": True,
            "enable_memory_saver": self.memory_saver,
            "enable_return_routed_experts": self.return_routed_experts,
        }
