"""The default rollout function, and the public pieces of it that plugins call.

Names and signatures are public. Invariant: everything runs on one event loop a process (loop.py); training
and evaluation use the same runner. Knows `args` so that the modules below it need not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from slime.errors import DeadlineError, HookError
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.batch_hooks import BatchHooks
from slime.rollout.data_source import check_can_take_back, check_takes_back
from slime.rollout.eval import evaluate
from slime.rollout.events import NO_LOG, EventLog
from slime.rollout.generate import generate_sample
from slime.rollout.group_source import Source
from slime.rollout.hooks import check_hooks
from slime.rollout.inflight import IN_FLIGHT, Watchdog
from slime.rollout.loop import run_blocking
from slime.rollout.metrics import drop_metrics, timing_metrics
from slime.rollout.outcome import Failed, Member, MemberGroup, Rollout
from slime.rollout.policy import Policy, Synchronous
from slime.rollout.runner import Call, Generate, RolloutRunner
from slime.rollout.scheduler import Scheduler
from slime.rollout.scheduling import Batch, Limits
from slime.rollout.session import SESSION
from slime.rollout.state import GenerateState, engine_url
from slime.rollout.stopping import GroupStop
from slime.rollout.tasks import rollout_seconds
from slime.utils.types import Sample

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "get_model_url",
]
logger = logging.getLogger(__name__)
IDLE_SECONDS = 30.0
"""How long an aborted engine may take to become idle."""


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout step: `rollout_batch_size` accepted groups; or an evaluation on all eval data sets.

    Args:
        args: flags by name, with `sglang_router_ip` and `sglang_router_port` as the engine's address.
        rollout_id: number of the step.

    Raises:
        RolloutFailedError: too many rollouts failed, or too many groups were dropped.
        DataError: the data source has no more prompts.
        HookError, ConfigError: a hook or a setting that cannot work.
    """
    if evaluation:
        return run_blocking(eval_rollout(args, rollout_id))
    return run_blocking(_train_step(args, rollout_id, data_source))


async def eval_rollout(args: Any, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on every eval data set of `args`.

    Raises:
        RolloutFailedError: no rollout of a data set succeeded.
    """
    check_hooks(args)
    state = GenerateState(args)
    with Watchdog(IN_FLIGHT):
        return await evaluate(args, rollout_id, make_runner=lambda limit: _runner(state, limit))


async def generate_and_rm_group(
    args: Any, group: MemberGroup, sampling_params: dict[str, Any], evaluation: bool = False
) -> MemberGroup:
    """Generate and reward the rollouts of a prompt; a rollout that fails comes back with status FAILED.

    Returns:
        One sample a rollout, or a list of siblings where the generate hook fans out.

    Raises:
        HookError: the generate hook broke its contract.
    """
    rollouts = await _runner(GenerateState(args)).run_group(group, _call(args, sampling_params, evaluation))
    return [_member(rollout) for rollout in rollouts]


async def generate_and_rm(
    args: Any, sample: Member, sampling_params: dict[str, Any], evaluation: bool = False
) -> Member:
    """Generate and reward one rollout; as `generate_and_rm_group`."""
    runner = _runner(GenerateState(args))
    return _member(await runner.run(sample, _call(args, sampling_params, evaluation)))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generation: one engine call, from the prompt or from where the sample stands."""
    limit = getattr(args, "rollout_max_context_len", None)
    return await _generate(GenerateState(args), args, sample, sampling_params, limit)


async def abort(args: Any, rollout_id: int) -> list[MemberGroup]:
    """Abort everything at the engine, and wait until it is idle; rollouts that wait for a slot give up.

    Returns:
        Always empty: aborted rollouts return, with status ABORTED, to whoever awaits them.

    Raises:
        DeadlineError: the engine is still busy after 30 s.
    """
    state = GenerateState(args)
    state.aborted = True
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        await state.engine.abort_all()
        loads = await state.engine.loads()
        if not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads):
            return []
        await asyncio.sleep(0.2)
    raise DeadlineError(
        f"the engine is still busy {IDLE_SECONDS:g} s after an abort", place=f"rollout step {rollout_id}"
    )


def get_model_url(args: Any, name: str | None = None, endpoint: str = "/generate") -> str:
    """URL of an endpoint of a named model, or of the default one.

    Args:
        name: key of `args.sglang_model_routers`, (host, port) by model; unknown names mean the default.
    """
    routers = getattr(args, "sglang_model_routers", None) or {}
    if name in routers:
        host, port = routers[name]
        return f"http://{host}:{port}{endpoint}"
    return engine_url(args) + endpoint


async def _train_step(args: Any, step: int, source: Source) -> RolloutFnTrainOutput:
    check_hooks(args)
    check_takes_back(args, source)
    if getattr(args, "async_training", False):
        check_can_take_back(source)
    state = GenerateState(args)
    state.reset()
    await _check_engines(args, state)
    policy = Synchronous(
        int(getattr(args, "over_sampling_batch_size", None) or args.rollout_batch_size),
        partial=bool(getattr(args, "partial_rollout", False)),
        ordered=bool(getattr(args, "deterministic_mode", False)),
    )
    scheduler = make_scheduler(args, source, state, policy, limits_of(args))
    with Watchdog(IN_FLIGHT), SESSION.using(scheduler):
        async with scheduler:
            batch = await scheduler.collect(step)
    return output_of(batch, state)


async def _check_engines(args: Any, state: GenerateState) -> None:
    """What the flags need of engines is asked before anything is generated.

    Raises:
        EngineError: an engine lacks it.
    """
    if getattr(args, "use_rollout_routing_replay", False):
        for url, able in (await state.engine.capabilities()).items():
            able.require("routed_experts", needed_by="--use-rollout-routing-replay", place=url)


def limits_of(args: Any, max_staleness: int | None = None, late_percentile: float = 1.0) -> Limits:
    """The limits that `args` sets; without the engine's version no age is known, so none is bounded."""
    given = getattr(args, "max_staleness", None)
    return Limits(
        wanted=int(args.rollout_batch_size),
        group_size=int(getattr(args, "n_samples_per_prompt", None) or 1),
        max_failed_ratio=float(getattr(args, "max_failed_rollout_ratio", 0.5)),
        max_staleness=max_staleness if given is None or SESSION.version is None else int(given),
        wait_seconds=rollout_seconds(args),
        late_percentile=float(getattr(args, "late_percentile", None) or late_percentile),
    )


def make_scheduler(
    args: Any, source: Source, state: GenerateState, policy: Policy, limits: Limits
) -> Scheduler:
    """A scheduler whose rollouts run on the engine of `args`."""
    hooks, runner = BatchHooks(args, source), _runner(state, log=SESSION.log)

    async def run_group(group: MemberGroup, step: int, stop: GroupStop) -> list[Rollout]:
        call = _call(args, state.sampling_params, evaluation=False, step=step)
        return await runner.run_group(group, call, stop)

    return Scheduler(
        source=source,
        run_group=run_group,
        policy=policy,
        limits=limits,
        judge=hooks.judge,
        finish=hooks.finish,
        ledger=state.ledger,
        log=SESSION.log,
    )


def output_of(batch: Batch, state: GenerateState) -> RolloutFnTrainOutput:
    """A closed batch as rollout functions give it."""
    logger.info("%s\n%s", batch.account.line(), state.ledger.total.line())
    rollouts = [rollout for run in batch.groups for rollout in run.rollouts]
    metrics = batch.account.metrics() | drop_metrics(batch.drops) | timing_metrics(rollouts)
    metrics |= {f"rollout/{name}": float(count) for name, count in {"cut": 0, **state.counts}.items()}
    metrics["rollout/cut_trained"] = float(sum(map(_trains_cut, rollouts)))
    state.counts.clear()
    if SESSION.version is not None:
        metrics["rollout/oldest_token_age"] = float(max(batch.age, 0))
    SESSION.hand_out(batch.step, [run.resumable() for run in batch.groups])
    return RolloutFnTrainOutput(samples=[run.members for run in batch.groups], metrics=metrics)


def _trains_cut(rollout: Rollout) -> bool:
    cut = any("cut" in sample.metadata for sample in rollout.samples)
    return cut and rollout.valid and not rollout.removed


def runner_for(args: Any, max_context_len: int | None = None) -> RolloutRunner:
    """A runner on the engine of `args`, for rollouts that belong to no step."""
    return _runner(GenerateState(args), max_context_len)


def _runner(
    state: GenerateState, max_context_len: int | None = None, log: EventLog = NO_LOG
) -> RolloutRunner:
    args = state.args
    limit = max_context_len or getattr(args, "rollout_max_context_len", None)

    async def default(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        return await _generate(state, args, sample, sampling_params, limit)

    hook: Generate = default
    return RolloutRunner(
        args,
        generate=hook,
        slots=state.semaphore,
        gives_up=lambda: state.aborted,
        log=log,
        counts=state.counts,
    )


async def _generate(
    state: GenerateState, args: Any, sample: Sample, sampling_params: dict[str, Any], limit: int | None
) -> Sample:
    return await generate_sample(
        sample,
        sampling_params,
        engine=state.engine,
        tokenizer=state.tokenizer,
        max_context_len=limit,
        timeout=rollout_seconds(args),
        args=args,
    )


def _call(args: Any, sampling_params: dict[str, Any], evaluation: bool, step: int | None = None) -> Call:
    seed = getattr(args, "rollout_seed", None)
    return Call(step=step, sampling_params=sampling_params, evaluation=evaluation, seed=seed)


def _member(rollout: Rollout) -> Member:
    """What a direct caller gets: broken contracts raise, other failures are in the status."""
    broken = isinstance(rollout.error, HookError) and rollout.error.__cause__ is None
    if broken and isinstance(rollout.outcome, Failed):
        assert rollout.error is not None
        raise rollout.error
    return rollout.member
