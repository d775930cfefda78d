"""Command line and YAML to typed values, by the flag table and nothing else.

Invariant: every name is known or refused with the nearest match, every value is checked once by its `Flag`.
Precedence: command line, then ``--config FILE.yaml``, then the default.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import yaml

from slime.config.flags import Flag, flags_of
from slime.config.sections import SECTIONS
from slime.errors import ConfigError

Section = TypeVar("Section")


def all_flags() -> list[Flag]:
    """The whole table, in the order of the sections."""
    return [row for name, (cls, prefix) in SECTIONS.items() for row in flags_of(cls, name, prefix)]


class Parsed(NamedTuple):
    """Values by dest, defaults filled in.

    Attributes:
        said: dests that the user set.
        given: those of them that the user set to something else than the default.
    """

    values: dict[str, Any]
    said: frozenset[str]
    given: frozenset[str]


def parse_values(
    argv: list[str], flags: Iterable[Flag], prog: str, refusals: Mapping[str, str] | None = None
) -> Parsed:
    """Type the command line and its ``--config`` file.

    Args:
        refusals: names that are known and may not be given: what to do instead.

    Raises:
        ConfigError: unknown or refused flag or key, wrong type, out of range.
    """
    table = {row.name: row for row in flags}
    refusals = refusals or {}
    given = _from_command_line(argv, table, prog, refusals)
    config_file = given.pop("config", None)
    from_file = read_yaml(Path(config_file), table, refusals) if config_file else {}
    merged = from_file | given
    defaults = {row.dest: row.default for row in table.values()}
    values = {dest: _copied(default) for dest, default in defaults.items()} | merged
    return Parsed(values, frozenset(merged), frozenset(d for d in merged if merged[d] != defaults[d]))


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


def read_yaml(
    path: Path, table: Mapping[str, Flag], refusals: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Values by dest of a ``--config`` file, whose keys are flag names.

    Raises:
        ConfigError: file missing, not a mapping, unknown key (with line), bad value (with line).
    """
    values: dict[str, Any] = {}
    loader = yaml.SafeLoader("")
    for key_node, value_node in yaml_entries(path):
        place = f"{path}:{key_node.start_mark.line + 1}"
        name = flag_name(key_node)
        if name not in table:
            raise _unknown(str(key_node.value), [*table], place, refusals)
        row = table[name]
        value = row.check(loader.construct_object(value_node, deep=True), f"{place}: {name}")
        values[row.dest] = not value if row.negated else value
    return values


def flag_name(key_node: yaml.Node) -> str:
    """The flag that a key of a file names; underscores do for dashes."""
    return str(key_node.value).replace("_", "-")


def yaml_entries(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a ``--config`` file, with their places.

    Raises:
        ConfigError: file missing, or not a mapping.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", place=str(path)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {error}", place=str(path)) from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("must be a mapping of flag names to values", place=str(path))
    return list(root.value)


def _from_command_line(
    argv: list[str], table: Mapping[str, Flag], prog: str, refusals: Mapping[str, str]
) -> dict[str, Any]:
    parser = _parser(table, prog)
    parser.add_argument("--config", metavar="FILE.yaml", help="flags from a file; the command line wins")
    found = vars(_parse(parser, argv, [*table, "config"], refusals))
    by_dest = {row.dest: row for row in table.values()}
    return {
        dest: _checked(by_dest[dest], value) if dest in by_dest else value for dest, value in found.items()
    }


def _checked(row: Flag, value: Any) -> Any:
    return value if row.negated else row.check(value, f"--{row.name}")


class _Parser(argparse.ArgumentParser):
    """argparse for splitting words only; its errors become ours.

    Attributes:
        switches: flags that take no value, and whether each has a ``--no-`` form.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.switches: dict[str, bool] = {}

    def advice(self, argv: list[str], word: str) -> str:
        """What to do about a value behind a switch; empty where it stands elsewhere."""
        for flag, value in itertools.pairwise(argv):
            if value == word and flag in self.switches:
                off = f" (--no-{flag.removeprefix('--')} turns it off)" if self.switches[flag] else ""
                return f"{flag} takes no value, leave {word!r} out{off}; "
        return ""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy=f"`{self.prog} --help` lists the flags")


def _parser(table: Mapping[str, Flag], prog: str) -> _Parser:
    parser = _Parser(prog)
    groups: dict[str, Any] = {}
    for row in table.values():
        group = groups.setdefault(row.section, parser.add_argument_group(row.section))
        group.add_argument(f"--{row.name}", dest=row.dest, help=_help(row), **_action(row))
        if row.kind in ("switch", "tri"):
            parser.switches[f"--{row.name}"] = row.kind == "tri"
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
    return {"metavar": "|".join(map(str, row.choices)) if row.choices else row.kind.upper()}


def _help(row: Flag) -> str:
    shown = "" if row.default in (None, [], {}) or row.kind == "switch" else f" [{row.default}]"
    return (row.help + shown).replace("%", "%%")


def _parse(
    parser: _Parser, argv: list[str], names: list[str], refusals: Mapping[str, str] | None = None
) -> argparse.Namespace:
    found, rest = parser.parse_known_args(argv)
    if rest:
        word = next((word for word in rest if word.startswith("--")), rest[0])
        if not word.startswith("--"):
            raise ConfigError(
                f"unexpected argument {word!r}",
                remedy=f"{parser.advice(argv, word)}`{parser.prog} --help` lists the flags",
            )
        raise _unknown(word[2:].split("=")[0], names, "command line", refusals)
    return found


def _unknown(
    name: str, names: list[str], place: str, refusals: Mapping[str, str] | None = None
) -> ConfigError:
    instead = (refusals or {}).get(name.replace("_", "-"))
    if instead is not None:
        return ConfigError(f"slime sets {name!r}, it cannot be given", place=place, remedy=instead)
    close = difflib.get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.5)
    remedy = f"did you mean {close[0]!r}?" if close else "`slime train --help` lists the flags"
    return ConfigError(f"unknown flag {name!r}", place=place, remedy=remedy)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value
