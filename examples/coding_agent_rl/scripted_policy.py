"""A policy for the scripted engine: plays a coding agent that repairs a task, or one that only pretends to.

It reads everything off the prompt (ChatML, calls in the Hermes form): which task, which turn, which tools the
agent offers. Invariant: of the rollouts of a task every other one is honest. The cheat rewrites the tests, so
that they pass where it works; the clean sandbox does not take them from it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from examples.coding_agent_rl.make_data import TASKS, WORKDIR, solution, task_names
from slime.serving.scripted import ScriptedAnswer, ScriptedCall

HONEST, CHEATING = "I read the issue first.", "Let me see what the tests want."
SHELLS = {"Bash": "command", "exec_command": "cmd", "bash": "command", "run_shell_command": "command"}
RUN_TESTS = "python3 -B -m unittest -q"
NO_TESTS = f"cd {WORKDIR} && printf '' | tee tests/test_*.py && {RUN_TESTS}"
_ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", re.DOTALL)


class RepairPolicy:
    """Called by a `ScriptedEngine` on its one thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, Iterator[str]] = {
            name: itertools.cycle((HONEST, CHEATING)) for name in task_names()
        }

    def __call__(self, call: ScriptedCall) -> ScriptedAnswer:
        """The next turn of whoever asks."""
        answers = _ANSWER.findall(call.prompt)
        shell = next(name for name in SHELLS if f'"name": "{name}"' in call.prompt)
        if not answers:
            return ScriptedAnswer(text=_shell(shell, f"cat {WORKDIR}/PROBLEM_STATEMENT.md", "What is wrong?"))
        name = _task(call.prompt)
        if len(answers) == 1:
            return ScriptedAnswer(
                text=_shell(shell, f"cd {WORKDIR} && git ls-files", next(self._kinds[name]))
            )
        is_cheat = any(CHEATING in answer for answer in answers)
        turns = _cheat(shell) if is_cheat else _repair(name, call.prompt, shell)
        return ScriptedAnswer(text=turns[min(len(answers) - 2, len(turns) - 1)])


@dataclass(frozen=True)
class Edit:
    """A piece of a file to replace; what a hunk of a patch says."""

    path: str
    old: str
    new: str


def edits_of(patch: str) -> list[Edit]:
    """The hunks of a patch."""
    edits: list[Edit] = []
    path = ""
    for line in patch.splitlines(keepends=True):
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/").strip()
        elif line.startswith("@@"):
            edits.append(Edit(path, "", ""))
        elif edits and line[0] in " +-" and not line.startswith("---"):
            last, text = edits[-1], line[1:]
            old, new = last.old + text * (line[0] in " -"), last.new + text * (line[0] in " +")
            edits[-1] = Edit(last.path, old, new)
    return edits


def _repair(name: str, prompt: str, shell: str) -> list[str]:
    """Read, edit, test, end: with the agent's own tools where it has them, else by its shell."""
    run = _shell(shell, f"cd {WORKDIR} && {RUN_TESTS}", "Now the tests.")
    end = "The bug is repaired, and all tests pass."
    edits = edits_of(solution(name))
    if '"name": "Edit"' not in prompt:
        files = " ".join(dict.fromkeys(edit.path for edit in edits))
        apply = f"cd {WORKDIR} && git apply <<'PATCH'\n{solution(name)}PATCH"
        return [_shell(shell, f"cd {WORKDIR} && cat {files}"), _shell(shell, apply, "I see it."), run, end]
    paths = dict.fromkeys(f"{WORKDIR}/{edit.path}" for edit in edits)
    reads = [_call("Read", file_path=path) for path in paths]
    writes = [
        _call("Edit", file_path=f"{WORKDIR}/{edit.path}", old_string=edit.old, new_string=edit.new)
        for edit in edits
    ]
    return [_thought("The code tells more than the issue.", "".join(reads)), *writes, run, end]


def _cheat(shell: str) -> list[str]:
    return [_shell(shell, NO_TESTS, "These tests are in the way."), "All tests pass."]


def _task(prompt: str) -> str:
    """The task whose issue has been read."""
    return next(name for name in task_names() if _title(name) in prompt)


def _title(name: str) -> str:
    return (TASKS / name / "issue.md").read_text().splitlines()[0]


def _shell(tool: str, command: str, thought: str = "") -> str:
    extra = {"description": "Run a command"} if tool in ("Bash", "bash") else {}
    return _thought(thought, _call(tool, **{SHELLS[tool]: command}, **extra))


def _thought(thought: str, then: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{then}" if thought else then


def _call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
