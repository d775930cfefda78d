"""Command line and YAML to typed values, by the flag table and nothing else.

Invariant: every name is known or refused with the nearest match, every value is checked once by its `Flag`.
Precedence: command line, then ``--config FILE.yaml``, then the default.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from slime.config.flags import Flag, flags_of
from slime.config.sections import SECTIONS
from slime.errors import ConfigError

Section = TypeVar("Section")


def all_flags() -> list[Flag]:
    """The whole table, in the order of the sections."""
    return [row for name, (cls, prefix) in SECTIONS.items() for row in flags_of(cls, name, prefix)]


def parse_values(argv: list[str], flags: Iterable[Flag], prog: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Values by dest (defaults filled in), and the dests that the user set to something else.

    Raises:
        ConfigError: unknown flag or key, wrong type, out of range.
    """
    table = {row.name: row for row in flags}
    given = _from_command_line(argv, table, prog)
    config_file = given.pop("config", None)
    from_file = read_yaml(Path(config_file), table) if config_file else {}
    merged = from_file | given
    defaults = {row.dest: row.default for row in table.values()}
    values = {dest: _copied(default) for dest, default in defaults.items()} | merged
    return values, frozenset(dest for dest in merged if merged[dest] != defaults[dest])


def parse_section(
    section: type[Section], argv: list[str], prog: str, positional: Mapping[str, str] | None = None
) -> tuple[Section, dict[str, Any]]:
    """One section from its own command line (flags without prefix), and the positional and extra arguments.

    Args:
        positional: name -> help of further arguments; a name that starts with dashes is optional.
    """
    rows = flags_of(section, section.__name__)
    parser = _parser({row.name: row for row in rows}, prog)
    for name, text in (positional or {}).items():
        parser.add_argument(name, help=text)
    found = vars(_parse(parser, argv, [row.name for row in rows]))
    by_dest = {row.dest: row for row in rows}
    values = {
        dest: _checked(row, found.pop(dest)) if dest in found else _copied(row.default)
        for dest, row in by_dest.items()
    }
    return section(**values), found


def read_yaml(path: Path, table: Mapping[str, Flag]) -> dict[str, Any]:
    """Values by dest of a ``--config`` file, whose keys are flag names.

    Raises:
        ConfigError: file missing, not a mapping, unknown key (with line), bad value (with line).
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", place=str(path)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {error}", place=str(path)) from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("must be a mapping of flag names to values", place=str(path))
    values: dict[str, Any] = {}
    loader = yaml.SafeLoader("")
    for key_node, value_node in root.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        name = str(key_node.value).replace("_", "-")
        if name not in table:
            raise _unknown(str(key_node.value), [*table], place)
        row = table[name]
        value = row.check(loader.construct_object(value_node, deep=True), f"{place}: {name}")
        values[row.dest] = not value if row.negated else value
    return values


def _from_command_line(argv: list[str], table: Mapping[str, Flag], prog: str) -> dict[str, Any]:
    parser = _parser(table, prog)
    parser.add_argument("--config", metavar="FILE.yaml", help="flags from a file; the command line wins")
    found = vars(_parse(parser, argv, [*table, "config"]))
    by_dest = {row.dest: row for row in table.values()}
    return {
        dest: _checked(by_dest[dest], value) if dest in by_dest else value for dest, value in found.items()
    }


def _checked(row: Flag, value: Any) -> Any:
    return value if row.negated else row.check(value, f"--{row.name}")


class _Parser(argparse.ArgumentParser):
    """argparse for splitting words only; its errors become ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy=f"`{self.prog} --help` lists the flags")


def _parser(table: Mapping[str, Flag], prog: str) -> _Parser:
    parser = _Parser(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    groups: dict[str, Any] = {}
    for row in table.values():
        group = groups.setdefault(row.section, parser.add_argument_group(row.section))
        group.add_argument(f"--{row.name}", dest=row.dest, help=_help(row), **_action(row))
    return parser


def _action(row: Flag) -> dict[str, Any]:
    if row.kind == "switch":
        return {"action": "store_const", "const": not row.negated}
    if row.kind == "tri":
        return {"action": argparse.BooleanOptionalAction}
    if row.kind == "append":
        return {"action": "append", "metavar": "PATH"}
    if row.kind in ("ints", "floats", "strs", "str_or_strs"):
        return {"nargs": "+", "metavar": row.kind.removeprefix("str_or_")[:-1].upper()}
    return {"metavar": "|".join(row.choices) if row.choices else row.kind.upper()}


def _help(row: Flag) -> str:
    shown = "" if row.default in (None, [], {}) or row.kind == "switch" else f" [{row.default}]"
    return (row.help + shown).replace("%", "%%")


def _parse(parser: _Parser, argv: list[str], names: list[str]) -> argparse.Namespace:
    found, rest = parser.parse_known_args(argv)
    if rest:
        word = next((word for word in rest if word.startswith("--")), rest[0])
        if not word.startswith("--"):
            raise ConfigError(
                f"unexpected argument {word!r}", remedy=f"`{parser.prog} --help` lists the flags"
            )
        raise _unknown(word[2:].split("=")[0], names, "command line")
    return found


def _unknown(name: str, names: list[str], place: str) -> ConfigError:
    close = difflib.get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.5)
    remedy = f"did you mean {close[0]!r}?" if close else "`slime train --help` lists the flags"
    return ConfigError(f"unknown flag {name!r}", place=place, remedy=remedy)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value
