"""From a patch to a verdict, in a sandbox that no agent has touched.

Invariant: a reward is given only where tests ran and said something; whatever keeps them from it raises
`AbortedError` with a reason that begins with ``unevaluatable``. Knows nothing of agents and tokens.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.coding_agent_rl.boxes import workdir_in
from slime.agent.sandbox import ExecResult, Sandbox, SandboxFileNotFoundError
from slime.errors import SlimeError

PLACE = ".harness/grading"  # below the work tree: no patch reaches there
CANNOT_RUN = (126, 127)
HELPER_SECONDS = 120
PYTEST_FAILED = 1
TAIL = 2000


class AbortedError(SlimeError):
    """A rollout that gets no reward. The message is its reason, as it is counted."""


@dataclass(frozen=True)
class Task:
    """What the metadata of a row says.

    Attributes:
        image: what sandboxes start from: a directory for local ones, else an image's name.
        must_pass: FAIL_TO_PASS and PASS_TO_PASS.
        run_script, parser: shell script, and Python program that reads its output (stdout, stderr) and writes
            a JSON file: ``{"tests": [{"name": ..., "status": "PASSED"}, ...]}``.
        eval_cmd: or a command that ends with 0 when all is well.
        f2p_script: or a file of pytest tests.
    """

    name: str
    image: str
    workdir: str
    must_pass: frozenset[str] = field(default_factory=frozenset)
    run_script: str = ""
    parser: str = ""
    eval_cmd: str = ""
    f2p_script: str = ""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Task:
        """Read a row.

        Raises:
            AbortedError: ``missing_image_or_workdir``, or it tells of no test.
        """
        if not metadata.get("image") or not metadata.get("workdir"):
            raise AbortedError("missing_image_or_workdir")
        task = cls(
            name=str(metadata.get("instance_id") or "task"),
            image=metadata["image"],
            workdir=metadata["workdir"],
            must_pass=frozenset(_names(metadata, "FAIL_TO_PASS") + _names(metadata, "PASS_TO_PASS")),
            **{
                name: str(metadata.get(name) or "")
                for name in ("run_script", "parser", "eval_cmd", "f2p_script")
            },
        )
        if not (task.run_script and task.parser and task.must_pass) and not (
            task.eval_cmd or task.f2p_script
        ):
            raise AbortedError("unevaluatable:no_tests")
        return task


@dataclass(frozen=True)
class Verdict:
    """What the tests said.

    Attributes:
        missing: tests that must pass and did not, where they have names.
        output: the end of what they wrote.
    """

    solved: bool
    missing: tuple[str, ...] = ()
    output: str = ""

    @property
    def reward(self) -> float:
        """1.0 or 0.0."""
        return float(self.solved)


async def grade(box: Sandbox, task: Task, patch: str, seconds: float) -> Verdict:
    """Apply `patch` in a fresh sandbox and run the task's tests.

    Raises:
        AbortedError: there is no verdict.
    """
    return await _Grading(box, task, seconds).verdict(patch)


class _Grading:
    """One patch in one sandbox. What the tests could tamper with is written only when they have ended."""

    def __init__(self, box: Sandbox, task: Task, seconds: float) -> None:
        self.box, self.task, self.seconds = box, task, seconds
        self.workdir = workdir_in(box, task.workdir)

    async def verdict(self, patch: str) -> Verdict:
        if patch:
            file = await self._write("agent.patch", patch)
            apply = f"git -c safe.directory='*' apply --binary --whitespace=nowarn {file}"
            await self._must(apply, "patch_does_not_apply")
        if self.task.run_script:
            return await self._by_names()
        if self.task.eval_cmd:
            result = await self._tests(self.task.eval_cmd)
            return Verdict(result.code == 0, output=_tail(result))
        await self._must("python3 -m pytest --version", "no_pytest")
        file = await self._write("test_fail_to_pass.py", self.task.f2p_script)
        result = await self._tests(f"python3 -m pytest -q -p no:cacheprovider --rootdir . {file}")
        if result.code not in (0, PYTEST_FAILED):
            raise AbortedError(f"unevaluatable:pytest_{result.code}", place=self.task.name)
        return Verdict(result.code == 0, output=_tail(result))

    async def _by_names(self) -> Verdict:
        script = await self._write("run_script.sh", self.task.run_script)
        result = await self._tests(f"$(command -v bash || command -v sh) {script}")
        await self._must(f"rm -rf {PLACE}", "no_report")
        out = await self._write("stdout.txt", result.stdout)
        err = await self._write("stderr.txt", result.stderr)
        parser = await self._write("parser.py", self.task.parser)
        await self._must(f"python3 -I {parser} {out} {err} {PLACE}/report.json", "parser_failed")
        missing = tuple(sorted(self.task.must_pass - _passed(await self._report())))
        return Verdict(not missing, missing, _tail(result))

    async def _tests(self, command: str) -> ExecResult:
        result = await self._exec(command, self.seconds)
        if result.timed_out:
            raise AbortedError("unevaluatable:timeout", place=self.task.name)
        if result.limit:
            raise AbortedError(f"unevaluatable:{result.limit}", place=self.task.name)
        if result.code in CANNOT_RUN:
            raise AbortedError("unevaluatable:cannot_run", place=f"{self.task.name}: {_tail(result)}")
        return result

    async def _must(self, command: str, reason: str) -> None:
        result = await self._exec(command, HELPER_SECONDS)
        if result.code:
            raise AbortedError(f"unevaluatable:{reason}", place=_tail(result))

    async def _exec(self, command: str, seconds: float) -> ExecResult:
        line = f"cd {shlex.quote(self.workdir)} && {{ {command}\n}}"
        return await self.box.exec(line, timeout=seconds, idempotent=False)

    async def _write(self, name: str, text: str) -> str:
        """Write a file below `PLACE`; its path from the work tree."""
        await self.box.write_file(f"{self.workdir}/{PLACE}/{name}", text)
        return f"{PLACE}/{name}"

    async def _report(self) -> str:
        try:
            return await self.box.read_file(f"{self.workdir}/{PLACE}/report.json")
        except SandboxFileNotFoundError as error:
            raise AbortedError("unevaluatable:no_report") from error


def _passed(report: str) -> frozenset[str]:
    try:
        return frozenset(test["name"] for test in json.loads(report)["tests"] if test["status"] == "PASSED")
    except (ValueError, KeyError, TypeError) as error:
        raise AbortedError("unevaluatable:bad_report", place=report[:TAIL]) from error


def _names(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A list of tests, or its JSON, as some data sets have it."""
    value = metadata.get(key) or []
    return list(json.loads(value)) if isinstance(value, str) else list(value)


def _tail(result: ExecResult) -> str:
    return (result.stderr or result.stdout)[-TAIL:]
