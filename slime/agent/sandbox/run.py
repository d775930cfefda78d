"""What works on every sandbox through `exec` alone: long commands, the agent's user, killing a tree, git
diffs.

Invariant: a command whose budget ran out is dead, with all that it started, when its exit code is given.
Processes are found by a variable in their environment, which a process that clears its environment does not
have.
"""

from __future__ import annotations

import asyncio
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence

from slime.agent.sandbox.base import (
    EXIT_TIME_BUDGET_EXCEEDED,
    Command,
    Sandbox,
    SandboxClosedError,
    SandboxError,
)

RUN_MARKER = "SLIME_RUN"
"""Environment variable by which the processes of one command are found; its value is the command's id."""

_WINDOW_SECONDS = 20.0
_LIVENESS = "running"


async def exec_and_wait(
    sb: Sandbox,
    cmd: Command,
    *,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    budget: float,
    cwd: str | None = None,
) -> int:
    """Run a long command to its end; its exit code, or `EXIT_TIME_BUDGET_EXCEEDED` when `budget` seconds were
    over.

    A backend whose `exec` kills trees itself runs it as one call. Elsewhere it runs detached, so that a
    connection that breaks does not end it, and its end is noticed within 0.1 s by waiting inside the sandbox.

    Raises:
        SandboxClosedError: the sandbox is gone, or the command's processes vanished without an exit code.
    """
    script = cmd if isinstance(cmd, str) else shlex.join(cmd)
    if cwd is not None:
        script = f"cd {shlex.quote(cwd)} && {{ {script}\n}}"
    if getattr(sb, "kills_trees", False):
        return (await sb.exec(script, user=user, env=env, timeout=budget, idempotent=False)).code
    run = f"run-{uuid.uuid4().hex[:16]}"
    deadline = time.monotonic() + budget
    try:
        await sb.exec(
            _detached(script, run),
            user=user,
            env={**(env or {}), RUN_MARKER: run},
            check=True,
            idempotent=False,
        )
        code = await _wait(sb, run, user, deadline)
    except asyncio.CancelledError:
        await asyncio.shield(kill_marked(sb, run))
        raise
    if code is None:
        await kill_marked(sb, run)
    return EXIT_TIME_BUDGET_EXCEEDED if code is None else code


def _detached(script: str, run: str) -> str:
    """Start the script in its own session; its exit code goes to a file, its output nowhere."""
    place = f"/tmp/.{run}"
    inner = f'{_SHELL}; echo $? > "$2/code.part" && mv "$2/code.part" "$2/code"'
    start = f"sh -c {shlex.quote(inner)} sh {shlex.quote(script)} {place}"
    session = "$(command -v setsid)"
    return f"mkdir -p {place} && {{ {session} {start} </dev/null >/dev/null 2>&1 & }}"


_LOOK = """
alive() {{ grep -qs {mark} /proc/[0-9]*/environ; }}
i=0
while [ ! -e {place}/code ] && [ $i -lt {tries} ]; do
  sleep 0.1; i=$((i+1)); [ $((i % 20)) -ne 0 ] || alive || break
done
[ -e {place}/code ] || ! alive || echo {alive}
[ ! -e {place}/code ] || cat {place}/code
"""
"""Wait in the sandbox; print the exit code, that it still runs, or nothing where its processes vanished."""

_SHELL = 'if command -v bash >/dev/null; then bash -c "$1"; else sh -c "$1"; fi'


async def _wait(sb: Sandbox, run: str, user: str, deadline: float) -> int | None:
    """The exit code, or None at the deadline."""
    place = f"/tmp/.{run}"
    while (left := deadline - time.monotonic()) > 0:
        tries = max(1, int(min(left, _WINDOW_SECONDS) * 10))
        look = _LOOK.format(place=place, tries=tries, mark=f"{RUN_MARKER}={run}", alive=_LIVENESS)
        _, text, _ = await sb.exec(look, user=user, timeout=_WINDOW_SECONDS + 30)
        answers = text.split()
        if not answers:
            raise SandboxClosedError(f"the command {run} vanished", place=f"sandbox {sb.sandbox_id}")
        if answers[-1] != _LIVENESS:
            return int(answers[-1])
    return None


async def kill_marked(sb: Sandbox, run: str) -> None:
    """Kill every process whose environment says that it belongs to the command `run`."""
    look = f"grep -ls {RUN_MARKER}={run} /proc/[0-9]*/environ | tr -dc '0-9\\n'"
    loop = (
        f'for i in 1 2 3 4 5 6 7 8 9 10; do p="$({look})"; [ -z "$p" ] && break; kill -9 $p 2>/dev/null; done'
    )
    await sb.exec(loop, timeout=60)


async def ensure_agent_user(sb: Sandbox, *, name: str = "agent", workdir: str | None = None) -> None:
    """Make sure that the user exists, and that `workdir` is its own where it is not root under another name.

    Raises:
        SandboxCommandError: there is no way to add a user.
    """
    if name in getattr(sb, "users", ()):
        return  # it comes with the box; where that has no users of its own, the host must get none
    who = shlex.quote(name)
    add = f"useradd -m -s /bin/bash {who} 2>/dev/null || adduser -D {who}"
    await sb.exec(f"id -u {who} >/dev/null 2>&1 || {add}", check=True)
    if workdir is not None:
        place = shlex.quote(workdir)
        await sb.exec(f'[ "$(id -u {who})" = "$(id -u)" ] || chown -R {who} {place}', timeout=600, check=True)


async def git_diff(sb: Sandbox, workdir: str, *, exclude: Sequence[str], since: str = "HEAD") -> str:
    """The change of a git work tree since a commit, new files included, without touching its index.

    Raises:
        SandboxError: the directory is not in a git work tree.
    """
    place = shlex.quote(workdir)
    kinds = (f":(exclude,glob)**/{pattern}{below}" for pattern in exclude for below in ("", "/**"))
    paths = " ".join(map(shlex.quote, kinds))
    mine = f"/tmp/.index-{uuid.uuid4().hex[:12]}"
    git = f"git -c safe.directory='*' -C {place}"
    code, text, error = await sb.exec(
        f"export GIT_INDEX_FILE={mine}; {git} read-tree {since} && {git} add -A -- . {paths} && "
        f"{git} diff --cached --binary {since} -- . {paths}; code=$?; rm -f {mine}; exit $code",
        timeout=300,
    )
    if code != 0:
        raise SandboxError(
            f"no diff of {workdir}: {error[-500:]}",
            place=f"sandbox {sb.sandbox_id}",
            remedy="the image's workspace must be a git work tree with a commit",
        )
    return text
