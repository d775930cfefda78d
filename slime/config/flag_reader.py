"""Runs in the engine's interpreter: ``python flag_reader.py version|flags sglang|router``, prints JSON.

``version`` prints the installed version, or null, without importing anything of it. ``flags`` prints each
flag of the program's own parser: ``{names, dest, kind, negated, choices, default, help}``, as in flags.py.
Imports the standard library and, for ``flags``, the program; nothing of slime.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any

_PROGRAMS = {
    "sglang": ("sglang", "sglang.srt.server_args", "ServerArgs"),
    "router": ("sglang-router", "sglang_router.router_args", "RouterArgs"),
}


def main(what: str, program: str) -> None:
    """Print what is asked for, and nothing else, on stdout: imports may print too."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        value = _version(program) if what == "version" else _flags(program)
        json.dump(value, answer)


def _version(program: str) -> str | None:
    try:
        return importlib.metadata.version(_PROGRAMS[program][0])
    except importlib.metadata.PackageNotFoundError:
        return None


def _flags(program: str) -> list[dict[str, Any]]:
    _, module, name = _PROGRAMS[program]
    parser = argparse.ArgumentParser(add_help=False)
    getattr(importlib.import_module(module), name).add_cli_args(parser)
    return [_row(parser, action) for action in parser._actions if action.option_strings]


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> dict[str, Any]:
    names = [word.lstrip("-") for word in action.option_strings if word.startswith("--")]
    kind = _kind(action)
    return {
        "names": [name for name in names if kind != "tri" or not name.startswith("no-")],
        "dest": action.dest,
        "kind": kind,
        "negated": isinstance(action, argparse._StoreFalseAction),
        "choices": [value for value in action.choices or () if isinstance(value, str | int | float)],
        "default": action.default if _is_plain(action.default) else None,
        "help": _help(parser, action),
    }


def _kind(action: argparse.Action) -> str:
    kind: Any = action.type
    if isinstance(action, argparse.BooleanOptionalAction):
        return "tri"
    if action.nargs == 0:
        return "switch"
    if isinstance(action, argparse._AppendAction):
        return "append"
    if action.nargs in ("+", "*") or isinstance(action.nargs, int):
        return {int: "ints", float: "floats"}.get(kind, "strs")
    return {int: "int", float: "float", json.loads: "json"}.get(kind, "str")


def _is_plain(value: object) -> bool:
    if value == argparse.SUPPRESS:
        return False
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if not action.help or action.help == argparse.SUPPRESS:
        return ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return parser._get_formatter()._expand_help(action)
    return action.help


if __name__ == "__main__":
    main(*sys.argv[1:])
