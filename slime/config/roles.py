"""Flags by role: what actor and critic have of their own in the file of ``--megatron-config-path``.

Invariant: a role's override is a flag like any other, by its flag's name, type and range; what a role does
not override is the command line's for both. Knows values by dest; knows no sections' contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime.config.flags import Flag
from slime.errors import ConfigError

FLAG, DEST = "--megatron-config-path", "megatron_config_path"
CRITIC = "critic_"
_ROLES = ("actor", "critic")
_KEYS = frozenset({"name", "role", "overrides", "args"})


@dataclass(frozen=True, slots=True)
class Role:
    """One entry of the file: whose flags it sets, by dest without prefix."""

    name: str
    overrides: Mapping[str, Any]


def apply_roles(
    values: Mapping[str, Any], given: frozenset[str], flags: Mapping[str, Flag]
) -> tuple[dict[str, Any], frozenset[str]]:
    """`values` and `given` as if the flags of each role had been given instead of the file.

    The critic's overrides are its ``--critic-`` flags. An actor's are the flags of model and training, and
    the critic keeps what the command line says.

    Args:
        flags: the table, by dest.

    Raises:
        ConfigError: the file does not read, or an entry, key or value that cannot be used; or a flag of the
            critic that is on the command line too.
    """
    path = values[DEST]
    if path is None:
        return dict(values), given
    result, known = dict(values) | {DEST: None}, set(given)
    for role in sorted(_roles(path), key=lambda role: role.name):
        for dest, value in role.overrides.items():
            place = f"{FLAG} {path}: {role.name}: {dest}"
            target = _target(role.name, dest, flags, place)
            if role.name == "actor" and CRITIC + dest in flags and result[CRITIC + dest] is None:
                result[CRITIC + dest] = values[dest]
            if role.name == "critic" and target.dest in given:
                raise ConfigError("is on the command line too", place=place, remedy=f"drop --{target.name}")
            result[target.dest] = target.check(value, place)
            known.add(target.dest)
    return result, frozenset(dest for dest in known if result[dest] != flags[dest].default)


def _target(role: str, dest: str, flags: Mapping[str, Flag], place: str) -> Flag:
    name = CRITIC + dest if role == "critic" else dest
    if name not in flags or (role == "actor" and flags[name].section not in ("model", "train")):
        have = sorted(name.removeprefix(CRITIC) for name in flags if name.startswith(CRITIC))
        raise ConfigError(
            "is nothing that a critic overrides" if role == "critic" else "is no flag of model or training",
            place=place,
            remedy=f"a critic has {', '.join(have)}" if role == "critic" else "see `slime train --help`",
        )
    return flags[name]


def _roles(path: str) -> list[Role]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}", place=FLAG) from error
    entries = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(entries, list) or set(content) != {"megatron"}:
        raise ConfigError(f"{path} must be a mapping of `megatron` to a list of roles", place=FLAG)
    roles = [_role(path, entry) for entry in entries]
    names = [role.name for role in roles]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path} has two entries of one role", place=FLAG, remedy="merge them")
    return roles


def _role(path: str, entry: Any) -> Role:
    if not isinstance(entry, dict) or entry.get("role") not in _ROLES or set(entry) - _KEYS:
        raise ConfigError(
            f"{path}: an entry needs `role` ({' or '.join(_ROLES)}) and `overrides`, got {entry!r}",
            place=FLAG,
        )
    overrides = entry.get("overrides") or entry.get("args") or {}
    if not isinstance(overrides, dict) or ("overrides" in entry and "args" in entry):
        raise ConfigError(f"{path}: `overrides` of {entry['role']} must be one mapping", place=FLAG)
    return Role(entry["role"], {str(key).replace("-", "_"): value for key, value in overrides.items()})
