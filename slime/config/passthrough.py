"""Flags of programs that slime starts and never imports: ``--sglang-X`` and ``--router-X``.

Invariant: the table of such flags is the one of the program's own parser, as installed in the environment of
``--sglang-python``; a flag of it is checked like one of ours, and one that slime itself must set is refused
with the reason. The table is read once for each version of a program (flag_reader.py), then the user's cache
has it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slime.config.flags import Flag, flags_of
from slime.config.router_section import RouterSettings
from slime.errors import ConfigError

Program: TypeAlias = Literal["sglang", "router"]
PROGRAMS: tuple[Program, ...] = ("sglang", "router")
_READER = Path(__file__).with_name("flag_reader.py")
_READ_SECONDS = 300.0
_PACKAGES = {"sglang": "sglang", "router": "sglang-router"}
_MORE_CHOICES = {("router", "policy"): ("consistent_hashing",)}
"""What a program takes through Python and not on its command line."""
_BY_SLIME = "slime sets it for each engine"
_REGISTERS = "slime tells the router of its engines itself"
MANAGED: dict[Program, dict[str, str]] = {
    "sglang": {
        "model_path": "give --hf-checkpoint, or `model_path` in --sglang-config",
        "config": "give the flags themselves",
        "trust_remote_code": "it is always set",
        "random_seed": "give --seed; each engine gets its own from it",
        "tp_size": "give --rollout-num-gpus-per-engine, the product with --sglang-pipeline-parallel-size",
        "nnodes": "give --rollout-num-gpus-per-engine and --num-gpus-per-node",
        "host": _BY_SLIME,
        "port": _BY_SLIME,
        "node_rank": _BY_SLIME,
        "dist_init_addr": _BY_SLIME,
        "base_gpu_id": _BY_SLIME,
        "gpu_id_step": _BY_SLIME,
        "nccl_port": _BY_SLIME,
        "weight_version": "slime counts versions",
        "skip_server_warmup": "it is always set",
    },
    "router": {
        "host": "give --sglang-router-ip for a router that runs already",
        "port": "give --sglang-router-port",
        "worker_urls": _REGISTERS,
        "pd_disaggregation": "--sglang-config says it, or --prefill-num-servers of a run",
        "prefill": _REGISTERS,
        "decode": _REGISTERS,
        "service_discovery": _REGISTERS,
        "request_timeout_secs": "give --sglang-router-request-timeout-secs",
    },
}
MANAGED_IN_RUNS: dict[Program, dict[str, str]] = {
    "sglang": {
        "enable_memory_saver": "give --offload-rollout",
        "enable_return_routed_experts": "give --use-rollout-routing-replay",
    },
    "router": {},
}
"""What follows from other flags of a run; engines that are only served may have it."""


def managed(program: Program, *, in_run: bool) -> dict[str, str]:
    """What to do instead of giving a field that slime sets itself, by field."""
    return MANAGED[program] | (MANAGED_IN_RUNS[program] if in_run else {})


@dataclass(frozen=True)
class ForeignTable:
    """The flags of one installed program.

    Attributes:
        flags: one a name; several names may have one dest, which has the program as its prefix.
        options: the program's own spelling of a flag, by the program's dest.
    """

    program: Program
    version: str
    flags: tuple[Flag, ...]
    options: Mapping[str, str]

    @cached_property
    def by_field(self) -> dict[str, Flag]:
        """Flag by the program's dest."""
        start = len(self.program) + 1
        return {row.dest[start:]: row for row in reversed(self.flags)}

    def usable(self, *, in_run: bool = True) -> list[Flag]:
        """Those that a user may give."""
        refused = self.refusals(in_run=in_run)
        return [row for row in self.flags if row.name not in refused]

    def refusals(self, *, in_run: bool = True) -> dict[str, str]:
        """What to do instead of giving a flag that slime sets, by name."""
        fields, start = managed(self.program, in_run=in_run), len(self.program) + 1
        return {row.name: fields[row.dest[start:]] for row in self.flags if row.dest[start:] in fields}

    def check(self, field: str, value: Any, place: str) -> Any:
        """The value of a field in its type, for files that name fields instead of flags.

        Args:
            field: the program's dest, or the same with dashes.

        Raises:
            ConfigError: no such field (names the nearest), or not a value for it.
        """
        name = field.replace("-", "_")
        if name not in self.by_field:
            close = difflib.get_close_matches(name, [*self.by_field], n=1, cutoff=0.5)
            remedy = f"did you mean {close[0]!r}?" if close else None
            raise ConfigError(f"{self._called} has no {field!r}", place=place, remedy=remedy)
        return self.by_field[name].check(value, f"{place}: {field}")

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """The program's command line for values by its dest."""
        return [word for field, value in values.items() for word in self._words_of(field, value)]

    def _words_of(self, field: str, value: Any) -> list[str]:
        row, option = self.by_field[field], self.options[field]
        if value is None:
            return []
        if row.kind == "switch":
            return [option] if value is not row.negated else []
        if row.kind == "tri":
            return [option if value else "--no-" + option.removeprefix("--")]
        if row.kind == "append":
            return [f"{option}={item}" for item in value]
        if isinstance(value, list):
            return [option, *map(str, value)]
        if isinstance(value, dict):
            return [f"{option}={json.dumps(value)}"]
        return [f"{option}={value}"]

    @property
    def _called(self) -> str:
        return f"{_PACKAGES[self.program]} {self.version}"


def own_router_table() -> ForeignTable:
    """The flags of the router that slime brings, where that is the router."""
    rows = flags_of(RouterSettings, "router", "router-")
    options = {row.dest.removeprefix("router_"): f"--{row.name}" for row in rows}
    return ForeignTable("router", "of slime", tuple(rows), options)


def table_of(program: Program, python: str | None, *, asked_by: str | None = None) -> ForeignTable:
    """The flags of `program` as installed for the interpreter `python` (default: this one).

    Args:
        asked_by: the flag that needs it, for the error.

    Raises:
        ConfigError: it is not installed there, or cannot be imported.
    """
    version = installed_version(program, python)
    if version is None:
        raise not_installed(program, python, asked_by or f"--{program}-...")
    kept = _cache_file(program, python, version)
    if not kept.exists():
        _write_whole(kept, _ask(python, "flags", program))
    return _table(program, version, json.loads(kept.read_bytes()))


def installed_version(program: Program, python: str | None) -> str | None:
    """The version of `program` for the interpreter, None where it is not installed. Imports nothing of it.

    Raises:
        ConfigError: there is no such interpreter.
    """
    return _version(program, _interpreter(python))


@cache
def _version(program: Program, python: str) -> str | None:
    version = json.loads(_ask(python, "version", program))
    return None if version is None else str(version)


def not_installed(program: Program, python: str | None, place: str) -> ConfigError:
    """The error that a program is not there, and how it comes there."""
    package = _PACKAGES[program]
    return ConfigError(
        f"{package} is not installed for {_interpreter(python)}",
        place=place,
        remedy=f"`pip install {package}` there, or name another interpreter with --sglang-python",
    )


def _interpreter(python: str | None) -> str:
    found = shutil.which(python or sys.executable)
    if found is None:
        raise ConfigError(
            f"there is no interpreter {python!r}",
            place="--sglang-python",
            remedy="the python of the environment where sglang is installed, e.g. /opt/sglang/bin/python",
        )
    return str(Path(found).absolute())


def _ask(python: str | None, what: str, program: Program) -> bytes:
    words = [_interpreter(python), str(_READER), what, program]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_READ_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot ask for flags: {error}", place="--sglang-python") from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.decode(errors="replace").splitlines()[-5:])
        raise ConfigError(
            f"{_PACKAGES[program]} cannot be imported by {words[0]}:\n{last}",
            place="--sglang-python",
            remedy="repair that environment, or name another interpreter",
        )
    return done.stdout


def _cache_file(program: Program, python: str | None, version: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = (_interpreter(python), _READER.read_text(encoding="utf-8"))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return root / "slime" / "flags" / f"{program}-{version}-{digest}.json"


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(path)


def _table(program: Program, version: str, entries: list[dict[str, Any]]) -> ForeignTable:
    flags: dict[str, Flag] = {}
    options: dict[str, str] = {}
    for entry in entries:
        field, names = entry["dest"], entry["names"]
        if not names:
            continue
        options.setdefault(field, f"--{names[0]}")
        for name in dict.fromkeys([*names, *(word.replace("_", "-") for word in (*names, field))]):
            flags.setdefault(f"{program}-{name}", _flag(program, name, entry))
    return ForeignTable(program, version, tuple(flags.values()), options)


def _flag(program: Program, name: str, entry: Mapping[str, Any]) -> Flag:
    # The dest of what is negated says the opposite of its flag.
    says_dest = entry["negated"] and name not in entry["names"]
    return Flag(
        name=f"{program}-{name}",
        dest=f"{program}_{entry['dest']}",
        section=_PACKAGES[program],
        kind="tri" if says_dest else entry["kind"],
        default=entry["default"],
        help=entry["help"],
        choices=(*entry["choices"], *_more_choices(program, entry)),
        negated=entry["negated"] and not says_dest,
    )


def _more_choices(program: Program, entry: Mapping[str, Any]) -> tuple[str, ...]:
    more = _MORE_CHOICES.get((program, entry["dest"]), ())
    return tuple(value for value in more if entry["choices"] and value not in entry["choices"])
