"""Findings for a person and for a program, and the whole check of a command line.

Invariant: the exit code is 0 only if a hook was checked and nothing failed. Knows no single contract.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime.contracts.finding import Finding
from slime.contracts.stage import SECONDS, Stage
from slime.contracts.suite import CONTRACTS, findings, named_hooks
from slime.errors import ConfigError
from slime.rollout.hooks import flag_name

_STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def check(
    argv: Sequence[str],
    *,
    dests: Sequence[str] = tuple(CONTRACTS),
    prog: str = "slime check",
    otherwise: Sequence[tuple[str, str]] = (),
) -> int:
    """Check the hooks that a command line names, print what comes of it, and return the exit code.

    Args:
        argv: a generate hook (``my.module:generate``), flags of this check, and flags of training.
        dests: hooks that are looked at.
        otherwise: (dest, path) of the hooks to check where the command line names none.

    Raises:
        ConfigError: no hook is named, or a flag is not known.
    """
    words = list(argv)
    generate = [words.pop(0)] if words and not words[0].startswith("-") else []
    options, flags = _parser(prog).parse_known_args(words)
    flags += [word for path in generate for word in ("--custom-generate-function-path", path)]
    flags += [] if options.reward is None else ["--custom-rm-path", options.reward]
    with Stage(flags, script=options.script, seconds=options.seconds) as stage:
        hooks = named_hooks(stage, dests) or list(otherwise)
        if not hooks:
            names = ", ".join(map(flag_name, dests))
            raise ConfigError("says nothing to check", place=prog, remedy=f"name a hook: {names}")
        found = list(findings(stage, hooks))
        is_blocked = bool(stage.is_blocked)
    if options.json:
        print(as_json(found))
    else:
        show(found, Console(width=options.width))
    code = int(any(finding.verdict == "failed" for finding in found))
    if is_blocked:
        sys.stdout.flush()
        os._exit(code)  # the hook still holds the event loop's thread, which would be waited for
    return code


def script(argv: Sequence[str], dests: Sequence[str], prog: str, otherwise: Sequence[tuple[str, str]]) -> int:
    """`check` for a script of its own: hooks are found from where the user stands."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return check(argv, dests=dests, prog=prog, otherwise=otherwise)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2


def as_json(found: Iterable[Finding]) -> str:
    """A list of objects with the fields of `Finding`."""
    return json.dumps([asdict(finding) for finding in found], indent=2)


def show(found: Sequence[Finding], console: Console) -> None:
    """A table a hook, the failures in full behind it, and one line that sums up."""
    for hook in dict.fromkeys(finding.hook for finding in found):
        own = [finding for finding in found if finding.hook == hook]
        console.print(f"\n[bold]{escape(hook)}[/]", soft_wrap=True)
        console.print(_table(own))
        for finding in own:
            if finding.verdict == "failed":
                console.print(_failure(finding), soft_wrap=True)
    counts = {verdict: sum(f.verdict == verdict for f in found) for verdict in _STYLES}
    console.print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _table(found: Sequence[Finding]) -> Table:
    table = Table(show_edge=False, box=SIMPLE_HEAD)
    for name in ("contract", "verdict", "note"):
        table.add_column(name, no_wrap=name != "note")
    for finding in found:
        note = "see below" if finding.verdict == "failed" else finding.message
        style = _STYLES[finding.verdict]
        table.add_row(escape(finding.contract), f"[{style}]{finding.verdict}[/]", escape(note))
    return table


def _failure(finding: Finding) -> str:
    lines = (
        f"\n[{_STYLES['failed']}]{escape(finding.contract)}[/]: {escape(finding.message)}",
        f"  law: {escape(finding.law)}",
        f"  mend: {escape(finding.remedy)}",
    )
    return "\n".join(lines)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [my.module:generate] [--reward my.module:reward] [flags]",
        description="Check hooks against their contracts, on a scripted engine.",
        epilog="All other flags are those of `slime train`, every hook's --...-path among them. "
        "`slime check --arithmetic` checks estimator, loss and the trainer's hooks instead.",
        allow_abbrev=False,
    )
    parser.add_argument("--reward", metavar="PATH", help="a reward hook; the same as --custom-rm-path")
    parser.add_argument(
        "--script", metavar="PATH", help="a function (ScriptedCall) -> ScriptedAnswer that plays the model"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="deadline of one call of a hook [%(default)g]"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--width", type=int, help="width of the tables in characters")
    return parser
