"""The generate hook: a coding agent repairs a repository in a sandbox, tests in a clean one give the reward.

    slime train --custom-generate-function-path examples.coding_agent_rl.generate.generate ...

Invariant: a rollout ends with the samples of its session, rewarded by a verdict, or with one sample that says
why there is none (`metadata["abort_reason"]`): a failure is never a reward.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import shlex
import time
import uuid
from pathlib import Path
from typing import Any

from examples.coding_agent_rl.boxes import booted, workdir_in
from examples.coding_agent_rl.grading import AbortedError, Task, grade
from examples.coding_agent_rl.service import Service, service_for
from examples.coding_agent_rl.settings import Settings
from slime.agent.harness import AGENT_USER, HARNESSES, agent_log
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Sandbox
from slime.agent.sandbox.run import git_diff
from slime.agent.session import new_session_id
from slime.errors import ConfigError, SlimeError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
NOT_IN_THE_PATCH = ("PROBLEM_STATEMENT.md", ".harness")
DEFAULT_CONTEXT, DEFAULT_ANSWER = 65536, 8192
TAIL = 1000


class AgentFailedError(SlimeError):
    """The agent's program ended with an error: what it left is no attempt of the policy's."""


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """One rollout; its samples are siblings: they share one `rollout_id` and the whole reward.

    Raises:
        ConfigError: the environment or the flags cannot work; nothing else.
    """
    settings = Settings.from_environment()
    settings.check(args)
    rollout = _Rollout(args, sample, sampling_params, evaluation, settings)
    guard = asyncio.timeout(settings.guard_seconds)
    try:
        async with guard:
            return await rollout.run()
    except ConfigError:
        raise
    except AbortedError as error:
        return rollout.aborted(error.message, error.place)
    except Exception as error:  # noqa: BLE001 - boundary: a rollout
        if guard.expired():
            return rollout.aborted("wall_clock_timeout", f"after {settings.guard_seconds:g} s")
        logger.warning("rollout %s: %s: %s", sample.rollout_id, type(error).__name__, error)
        return rollout.aborted(f"exception:{type(error).__name__}", str(error))


class _Rollout:
    """One agent on one task."""

    def __init__(
        self,
        args: Any,
        sample: Sample,
        sampling_params: dict[str, Any],
        evaluation: bool,
        settings: Settings,
    ) -> None:
        self.args, self.sample, self.settings = args, sample, settings
        self.sampling_params = sampling_params
        limits = ("eval_max_context_len", "rollout_max_context_len")
        found = [getattr(args, name, None) for name in limits[0 if evaluation else 1 :]]
        self.context = next((limit for limit in found if limit), DEFAULT_CONTEXT)
        self.session = new_session_id()
        self.facts: dict[str, Any] = {}

    async def run(self) -> list[Sample]:
        """The samples, rewarded."""
        task = Task.of(self.sample.metadata)
        service = service_for(self.args, self.settings)
        service.adapter.open_session(
            self.session, sampling_defaults=self.sampling_params, max_context_tokens=self.context
        )
        try:
            patch = await self._work(task, service)
            if not service.adapter.manager.turn_count(self.session):
                raise AbortedError("adapter_session_empty", place=task.name)
            reward = await self._grade(task, patch)
            samples = await service.adapter.finish_session(
                self.session, base_sample=self.sample, reward=reward, extra_metadata=self.facts
            )
        finally:
            await service.adapter.drop_session(self.session)
        if not samples:
            raise AbortedError("adapter_session_empty", place=task.name)
        return samples

    async def _work(self, task: Task, service: Service) -> str:
        """Let the agent work; the patch that it leaves."""
        started = time.perf_counter()
        async with booted(self.settings, task.image, task.workdir) as box:
            workdir = workdir_in(box, task.workdir)
            head = f"git -c safe.directory='*' -C {shlex.quote(workdir)} rev-parse HEAD"
            base = (await box.exec(head, check=True)).stdout.strip()
            await box.write_file(f"{workdir}/PROBLEM_STATEMENT.md", _text(self.sample.prompt))
            await HARNESSES[self.settings.agent].install_cli(box)
            self.facts["boot_seconds"] = time.perf_counter() - started
            async with service.reachable(box) as url:
                await self._run_agent(box, task, workdir, url)
            patch = await git_diff(box, workdir, exclude=NOT_IN_THE_PATCH, since=base)
        self.facts["patch"] = patch
        return patch

    async def _run_agent(self, box: Sandbox, task: Task, workdir: str, url: str) -> None:
        started = time.perf_counter()
        code = await HARNESSES[self.settings.agent].run(
            box,
            workdir=workdir,
            session_id=self.session,
            adapter_url=url,
            time_budget_sec=self.settings.agent_seconds,
            prompt=self.settings.prompt,
            context_tokens=self.context,
            max_output_tokens=int(self.sampling_params.get("max_new_tokens") or DEFAULT_ANSWER),
            max_turns=self.settings.max_turns,
        )
        self.facts["agent_seconds"] = time.perf_counter() - started
        log = await agent_log(box, workdir)
        await self._keep(task, log)
        if code == EXIT_TIME_BUDGET_EXCEEDED:
            raise AbortedError("wall_clock_timeout", place=f"{task.name}: the agent's time is over")
        if code:
            said = await box.read_file(f"{workdir}/.harness/stderr.log", user=AGENT_USER)
            raise AgentFailedError(f"ended with {code}: {(said or log)[-TAIL:]}", place=self.settings.agent)

    async def _keep(self, task: Task, log: str) -> None:
        """Keep the agent's own log with the rollout, where a folder for it is known."""
        run_dir = getattr(self.args, "run_dir", None)
        folder = self.settings.log_dir or (run_dir and f"{run_dir}/agents")
        if folder:
            path = Path(folder) / f"{task.name}-{self.sample.rollout_id}-{uuid.uuid4().hex[:8]}.jsonl"
            await asyncio.to_thread(_write, path, log)
            self.facts["agent_log"] = str(path)

    async def _grade(self, task: Task, patch: str) -> float:
        started = time.perf_counter()
        async with booted(self.settings, task.image, task.workdir) as box:
            verdict = await grade(box, task, patch, self.settings.eval_seconds)
        self.facts |= {"tests_missing": list(verdict.missing), "tests_output": verdict.output}
        self.facts["grade_seconds"] = time.perf_counter() - started
        return verdict.reward

    def aborted(self, reason: str, detail: str | None) -> list[Sample]:
        """One sample that trains nothing and votes nowhere."""
        lost = copy.deepcopy(self.sample)
        lost.tokens, lost.response_length, lost.loss_mask, lost.rollout_log_probs = [0, 0], 1, [0], [0.0]
        lost.status, lost.remove_sample, lost.reward = Sample.Status.ABORTED, True, None
        lost.metadata |= self.facts | {"abort_reason": reason, "abort_detail": detail or ""}
        return [lost]


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """The issue; of messages, what they say."""
    return prompt if isinstance(prompt, str) else "\n\n".join(str(part["content"]) for part in prompt)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
