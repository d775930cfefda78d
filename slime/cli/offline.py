"""What `slime eval` and `slime rollout` share: their options, the engine, the result file, the report.

Invariant: whatever ends the verb, the result file can be gone on with. Imports neither Ray nor torch; with
``--engine-url`` there is no model in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.cli.signals import terminable
from slime.config import Config, load_config
from slime.config.args_view import ArgsView
from slime.config.validate import CHECKS_OFFLINE
from slime.errors import ConfigError, EngineError, SlimeError
from slime.rollout.failures import FailureBudget
from slime.rollout.hooks import load_hook
from slime.rollout.inflight import IN_FLIGHT, Watchdog
from slime.rollout.loop import run_blocking
from slime.rollout.offline import Job, Summary, Work, summaries
from slime.rollout.provenance import provenance
from slime.rollout.result_file import GroupRecord, ResultFile
from slime.rollout.state import GenerateState, slots_of
from slime.utils.engine_client import EngineClient

INTERRUPTED = 130
RESULTS = "results.jsonl"
DEFAULT_ROLLOUTS = (
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)
_HOOKS = (
    "custom_generate_function_path",
    "rollout_sample_hook_path",
    "custom_rm_path",
    "data_source_path",
)
"""Those that these verbs call; others may need torch."""
_PROGRESS_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of these verbs beside the flags of training."""

    verb: str
    engine_url: str | None
    output: Path
    limit: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done.

    Attributes:
        data_sets: for the provenance: name -> path, sampling and what else shapes its rollouts.
    """

    works: list[Work]
    data_sets: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it: the records of the planned groups, in order."""

    records: list[GroupRecord]
    summaries: dict[str, Summary]
    provenance: dict[str, Any]


def parse(verb: str, description: str | None, argv: list[str]) -> tuple[Options, Config]:
    """The options and the configuration of a command line.

    Raises:
        ConfigError: anything that cannot run.
    """
    parser = argparse.ArgumentParser(
        prog=f"slime {verb}",
        description=description,
        epilog="All other flags are those of `slime train`, --config FILE.yaml included; those of training "
        "and of its schedule have no effect here.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--engine-url", help="http://HOST:PORT of an engine that runs [start one]")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results; goes on with them")
    parser.add_argument("--limit", type=int, help="only the first N prompts; of each data set in eval")
    found, rest = parser.parse_known_args(argv)
    if found.limit is not None and found.limit < 1:
        raise ConfigError(f"must be at least 1, got {found.limit}", place="--limit")
    options = Options(verb=verb, engine_url=found.engine_url, output=found.output, limit=found.limit)
    config = load_config(rest, prog=f"slime {verb}", checks=CHECKS_OFFLINE)
    for dest in _HOOKS:
        value = getattr(config.args(), dest)
        for path in value if isinstance(value, list) else [value]:
            if path:
                load_hook(path, dest)
    return options, config


def refuse_other_functions(config: Config, *paths: str | None) -> None:
    """Refuse rollout functions that make rollouts in their own way.

    Raises:
        ConfigError: one of the paths is set to a function of the user's.
    """
    own = next((path for path in paths if path is not None and path not in DEFAULT_ROLLOUTS), None)
    if own is not None:
        raise ConfigError(
            f"{own} makes rollouts in its own way, which cannot be resumed group by group",
            place="--rollout-function-path, --eval-function-path",
            remedy="leave it out; generate hooks, sample hooks and rewards are used as in training",
        )


def perform(
    options: Options, config: Config, make_plan: Callable[[ArgsView], Plan], *, keeps_tokens: bool
) -> Outcome | None:
    """Do what is missing; None where it was interrupted.

    Raises:
        SlimeError: what cannot be done; results so far are kept.
    """
    results = options.output / RESULTS
    try:
        with terminable(), _engine(options, config) as url:
            client = EngineClient(url)
            info = run_blocking(client.model_info())
            args = _connected(config, url, info)
            plan = run_blocking(_made(make_plan, args))
            about = provenance(args, info, _tokenizer(args), plan.data_sets) | {"user": dict(config.user)}
            with ResultFile(results, about) as file:
                _do(file, plan, args, info, keeps_tokens, options.verb)
                records = [file.records[work.data_set, work.group_index] for work in plan.works]
    except KeyboardInterrupt:
        print(f"slime {options.verb}: interrupted; the same command goes on from {results}", file=sys.stderr)
        return None
    return Outcome(records=records, summaries=summaries(records), provenance=about)


async def _made(make_plan: Callable[[ArgsView], Plan], args: ArgsView) -> Plan:
    """Runners hold slots of the loop that they are made on."""
    return make_plan(args)


def _do(
    file: ResultFile, plan: Plan, args: ArgsView, info: Mapping[str, Any], keeps_tokens: bool, verb: str
) -> None:
    budget = FailureBudget(
        max_ratio=float(args.max_failed_rollout_ratio),
        planned=sum(len(work.group) for work in plan.works),
        step=0,
    )
    job = Job(
        results=file,
        budget=budget,
        version=info.get("weight_version"),
        keeps_tokens=keeps_tokens,
        whole_groups=bool(args.group_rm),
        width=slots_of(args),
        tell=_Progress(verb),
    )
    missing, planned = job.missing_rollouts(plan.works), sum(len(work.group) for work in plan.works)
    print(f"slime {verb}: {missing} of {planned} rollouts to do", file=sys.stderr, flush=True)
    with Watchdog(IN_FLIGHT):
        run_blocking(job.run(plan.works))


class _Progress:
    """A line now and then, about twenty in all."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._told = 0

    def __call__(self, done: int, total: int, failed: int) -> None:
        part = done * _PROGRESS_LINES // total
        if part > self._told or done == total:
            self._told = part
            print(
                f"slime {self._verb}: {done} of {total} groups, {failed} rollouts failed",
                file=sys.stderr,
                flush=True,
            )


def _connected(config: Config, url: str, info: Mapping[str, Any]) -> ArgsView:
    """The flags, with the engine's address, and its model folder where none is named."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    model = config.model.hf_checkpoint
    if model is None:
        served = str(info.get("tokenizer_path") or info.get("model_path") or "")
        model = served if (Path(served) / "config.json").is_file() else None
    return config.args(sglang_router_ip=host, sglang_router_port=parts.port, hf_checkpoint=model)


def _tokenizer(args: ArgsView) -> Any:
    """The tokenizer of the rollouts; None where a hook makes them and no model is named."""
    if args.hf_checkpoint is None and args.custom_generate_function_path:
        return None
    return GenerateState(args).tokenizer


@contextlib.contextmanager
def _engine(options: Options, config: Config) -> Iterator[str]:
    """URL of the engine: the one that is named, or one of our own for as long as the verb runs."""
    if options.engine_url is not None:
        yield _checked_url(options.engine_url)
        return
    model = config.model.hf_checkpoint
    if model is None:
        raise ConfigError(
            "there is no engine",
            place="--engine-url, --hf-checkpoint",
            remedy="name an engine that runs, or the model folder that the embedded engine is to serve",
        )
    from slime.serving.embedded.process import EngineProcess

    process = EngineProcess(model, config.engine, options.output / "engine.log")
    try:
        yield process.url
    except SlimeError as error:
        if process.is_alive:
            raise
        raise EngineError(process.wait_for_exit(), place=process.url) from error
    finally:
        process.stop()


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None or parts.path.strip("/"):
        raise ConfigError(
            f"expects http://HOST:PORT, got {url!r}",
            place="--engine-url",
            remedy="engines speak plain HTTP at a host and a port; tunnel to others",
        )
    return url.rstrip("/")


def write_metrics(options: Options, outcome: Outcome, metrics: Mapping[str, float]) -> Path:
    """Write ``metrics.json``: the metrics, what failed and why, and the provenance."""
    path = options.output / "metrics.json"
    failed = {name: dict(summary.failed) for name, summary in outcome.summaries.items()}
    content = {"metrics": dict(metrics), "failed": failed, "provenance": outcome.provenance}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    return path


def print_table(outcome: Outcome, metrics: Mapping[str, float], prefix: str) -> None:
    """One row a data set: counts, mean reward, pass@k, truncation, length."""
    from rich.console import Console
    from rich.table import Table

    names = list(outcome.summaries)
    tries = sorted({int(key.rpartition("@")[2]) for key in metrics if "-pass@" in key})
    table = Table("data set", "rollouts", "failed", "reward", *(f"pass@{k}" for k in tries), "cut", "length")
    for name in names:
        key, summary = f"{prefix}/{name}", outcome.summaries[name]
        rates = [metrics.get(f"{key}-pass@{k}") for k in tries]
        values = [metrics.get(key), *rates, metrics.get(f"{key}-truncated_ratio")]
        table.add_row(
            name,
            str(len(summary.scores)),
            str(summary.failed.total()),
            *("" if value is None else f"{value:.3f}" for value in values),
            f"{metrics.get(f'{key}/response_len/mean', 0.0):.1f}",
        )
    Console(highlight=False).print(table)


def tell_failures(outcome: Outcome) -> None:
    """Why rollouts have no score, most frequent first."""
    for name, summary in outcome.summaries.items():
        for reason, count in summary.failed.most_common():
            print(f"{name}: {count} x {reason}")
    if any(summary.failed for summary in outcome.summaries.values()):
        print("failed rollouts are in no mean; the same command does them again")
