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

from slime.agent.sandbox import ExecResult, Sandbox, SandboxFileNotFoundError
from slime.errors import SlimeError

PLACE = "/tmp/slime-grading"
CANNOT_RUN = (126, 127)
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
    if patch:
        await box.write_file(f"{PLACE}/agent.patch", patch)
        apply = f"git -c safe.directory='*' apply --binary --whitespace=nowarn {PLACE}/agent.patch"
        await _must(box, f"cd {shlex.quote(task.workdir)} && {apply}", "patch_does_not_apply")
    if task.run_script:
        return await _by_names(box, task, seconds)
    if task.eval_cmd:
        result = await _tests(box, task, task.eval_cmd, seconds)
        return Verdict(result.code == 0, output=_tail(result))
    await _must(box, "python3 -m pytest --version", "no_pytest")
    await box.write_file(f"{PLACE}/test_fail_to_pass.py", task.f2p_script)
    run = f"python3 -m pytest -q -p no:cacheprovider --rootdir . {PLACE}/test_fail_to_pass.py"
    result = await _tests(box, task, run, seconds)
    if result.code not in (0, PYTEST_FAILED):
        raise AbortedError(f"unevaluatable:pytest_{result.code}", place=task.name)
    return Verdict(result.code == 0, output=_tail(result))


async def _by_names(box: Sandbox, task: Task, seconds: float) -> Verdict:
    await box.write_file(f"{PLACE}/run_script.sh", task.run_script)
    await box.write_file(f"{PLACE}/parser.py", task.parser)
    files = " ".join(f"{PLACE}/{name}" for name in ("stdout.txt", "stderr.txt", "report.json"))
    out, err, report = files.split()
    shell = "$(command -v bash || command -v sh)"
    result = await _tests(box, task, f"{shell} {PLACE}/run_script.sh > {out} 2> {err}", seconds)
    await _must(box, f"python3 -I {PLACE}/parser.py {files}", "parser_failed")
    passed = _passed(await _read(box, report))
    missing = tuple(sorted(task.must_pass - passed))
    return Verdict(not missing, missing, (await _read(box, err) or _tail(result))[-TAIL:])


async def _tests(box: Sandbox, task: Task, command: str, seconds: float) -> ExecResult:
    result = await box.exec(
        f"cd {shlex.quote(task.workdir)} && {{ {command}\n}}", timeout=seconds, idempotent=False
    )
    if result.timed_out:
        raise AbortedError("unevaluatable:timeout", place=task.name)
    if result.limit:
        raise AbortedError(f"unevaluatable:{result.limit}", place=task.name)
    if result.code in CANNOT_RUN:
        raise AbortedError("unevaluatable:cannot_run", place=f"{task.name}: {_tail(result)}")
    return result


async def _must(box: Sandbox, command: str, reason: str) -> None:
    result = await box.exec(command, timeout=120)
    if result.code:
        raise AbortedError(f"unevaluatable:{reason}", place=_tail(result))


async def _read(box: Sandbox, path: str) -> str:
    try:
        return await box.read_file(path)
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
