"""The rollout side as an actor: data source, rollout and eval functions, conversion to training rows.

Knows the engine by its URL only. Invariant: what it hands to training is what the rollout function returned,
converted row by row; nothing is trimmed or re-ordered here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config import Config
from slime.errors import EngineError
from slime.observability.doctor import patient_of_environment
from slime.ray.batch import RolloutBatch
from slime.rollout import dump, events, unfinished
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.convert import flatten, to_train_samples
from slime.rollout.curriculum import CurriculumDataSource
from slime.rollout.events import EventLog
from slime.rollout.hook_calls import call_in_time, cancel_calls
from slime.rollout.inflight import IN_FLIGHT
from slime.rollout.log_hooks import EVALUATIONS, ROLLOUTS, has_logged
from slime.rollout.loop import background_loop, run_blocking
from slime.rollout.metrics import rollout_metrics
from slime.rollout.probe import probe_samples
from slime.rollout.rm_hub import check_reward_source
from slime.rollout.rm_hub.verdict import VERDICTS
from slime.rollout.scores import eval_metrics
from slime.rollout.seeds import seed_process
from slime.rollout.session import SESSION
from slime.rollout.tasks import rollout_seconds
from slime.train.batch import TrainSample
from slime.utils.misc import load_function
from slime.utils.parts import Part, declare, files_below
from slime.utils.types import Sample


class RolloutManager:
    """Makes rollouts and evaluations with the engine that it is connected to.

    Methods run on several threads: `progress` and `describe` answer while `generate` works. None is a
    coroutine: Ray would then run all of them on one event loop.
    """

    def __init__(self, config: Config, run_dir: str | None = None) -> None:
        self._args = config.args()
        self._overlaps = config.overlaps
        self._run_dir = Path(run_dir) if run_dir else None
        self._stopped = threading.Event()
        self._patient = patient_of_environment(self.describe)

    def start(self) -> None:
        """Load the data and the functions.

        Raises:
            DataError, ConfigError, HookError: data or configuration that cannot be used.
        """
        if self._run_dir is not None:
            SESSION.log = EventLog(self._run_dir / events.NAME)
        self._source = load_function(self._args.data_source_path)(self._args)
        self._rollout = load_function(self._args.rollout_function_path)
        self._evaluate = load_function(self._args.eval_function_path or self._args.rollout_function_path)
        dataset = getattr(self._source, "dataset", None)
        has_rewards = self._args.loss_type != "sft_loss"
        if has_rewards and self._args.load_debug_rollout_data is None:
            check_reward_source(self._args, dataset.samples if dataset is not None else None)

    def connect(
        self, addresses: Mapping[str, tuple[str, int]], engines: int, frozen: Sequence[str] = ()
    ) -> None:
        """Ask engines there from now on: host and port by model, the default one first.

        Args:
            engines: how many share the rollouts of the default model.
            frozen: models that take no weights of the trainer.
        """
        host, port = next(iter(addresses.values()))
        self._args = self._args.with_values(
            sglang_router_ip=host,
            sglang_router_port=port,
            sglang_model_routers=dict(addresses),
            sglang_frozen_models=tuple(frozen),
            rollout_num_engines=engines,
        )

    def watch(self) -> str:
        """Lasts as long as the actor is wanted."""
        self._stopped.wait()
        return "was stopped"

    def stop(self) -> None:
        """Cancel what runs, so that hooks clean up, and let `watch` return."""
        background_loop().cancel()
        cancel_calls()
        run_blocking(SESSION.close())
        SESSION.log.close()
        self._stopped.set()

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Run one rollout step, or read its dump under ``--load-debug-rollout-data``."""
        started = time.perf_counter()
        seed_process(self._args.rollout_seed, rollout_id)
        output = self._output(rollout_id)
        samples = list(flatten(output.samples))
        _check_versions(samples)
        if self._args.save_debug_rollout_data:
            dump.save(self._args.save_debug_rollout_data, rollout_id, samples)
        SESSION.hand_out(rollout_id, output.samples)
        rows = to_train_samples(output.samples, self._args)
        metrics = self._logged(rollout_id, samples, output.metrics or {}, time.perf_counter() - started)
        return RolloutBatch(rows, metrics)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate on every eval data set; returns ``eval/`` metrics."""
        seed_process(self._args.rollout_seed, rollout_id)
        output = call_rollout_fn(self._evaluate, self._args, rollout_id, self._source, evaluation=True)
        extra = dict(output.metrics or {})
        if has_logged(self._args, EVALUATIONS, rollout_id, self._args, output.data, extra):
            return {}
        return eval_metrics(self._args, output.data) | extra

    def probe(self) -> list[TrainSample]:
        """A few short answers to prompts of the data, for comparing log-probs; the data position stays."""
        return probe_samples(self._args, self._source)

    def progress(self) -> tuple[int, int]:
        """Groups that are finished and wanted in the running step."""
        return IN_FLIGHT.progress

    def before_update(self) -> None:
        """The weights are about to change: what is in flight ends or is kept, as the policy says."""
        run_blocking(SESSION.before_update())

    def weights_changed(self, version: int) -> None:
        """The engine has the weights of this policy version."""
        run_blocking(SESSION.weights_changed(version))

    def describe(self) -> str:
        """A table of everything in flight: rollout id, phase, how long."""
        version = "not known" if SESSION.version is None else SESSION.version
        accepted, wanted = IN_FLIGHT.progress
        return f"policy version {version}, {accepted} of {wanted} groups\n{IN_FLIGHT.describe()}"

    def save(self, rollout_id: int) -> list[Part]:
        """Write the data source's state after a step, and declare what it wrote below ``--save``.

        Files with the step's number in their path belong to the step; one without it is written over by the
        next step, so no checkpoint can promise it.
        """
        root = Path(self._args.save)
        before = _stamps(root)
        if self._overlaps:
            groups = run_blocking(_saved_with_unfinished(self._ask_source, rollout_id))
            unfinished.save(root, rollout_id, groups)
        else:
            self._ask_source("save", rollout_id)
            unfinished.remove(root, rollout_id)
        written = [path for path, stamp in _stamps(root).items() if before.get(path) != stamp]
        number = re.compile(rf"(?<!\d)0*{rollout_id}(?!\d)")
        return declare(root, [path for path in written if number.search(str(path.relative_to(root)))])

    def load(self, rollout_id: int) -> None:
        """Read it back; what was in flight is given out first."""
        self._ask_source("load", rollout_id)
        groups = unfinished.load(Path(self._args.load), rollout_id) if self._args.load else []
        for group in groups:
            self._source.add_samples([group])

    def _ask_source(self, method: str, rollout_id: int) -> None:
        """Save or load the data source's state; the caller stands, the rollout loop too."""
        call_in_time(
            getattr(self._source, method),
            rollout_id,
            seconds=rollout_seconds(self._args),
            what=f"--data-source-path ({self._args.data_source_path})",
            place=f"{method}, rollout step {rollout_id}",
        )

    def _output(self, rollout_id: int) -> RolloutFnTrainOutput:
        path = self._args.load_debug_rollout_data
        if path:
            return RolloutFnTrainOutput(samples=dump.load_groups(path, rollout_id))
        output: RolloutFnTrainOutput = call_rollout_fn(
            self._rollout, self._args, rollout_id, self._source, evaluation=False
        )
        return output

    def _logged(
        self, rollout_id: int, samples: list[Sample], extra: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Metrics of the step; only the account (law 5) where the logging hook took over."""
        extra = extra | VERDICTS.take()
        if isinstance(self._source, CurriculumDataSource):
            extra |= self._source.metrics()
        if has_logged(self._args, ROLLOUTS, rollout_id, self._args, samples, extra, seconds):
            return {name: value for name, value in extra.items() if name.startswith("rollout/accounting/")}
        return extra | rollout_metrics(self._args, samples, seconds)


async def _saved_with_unfinished(ask_source: Callable[[str, int], None], rollout_id: int) -> list[Any]:
    """On the rollout loop, so that no group moves between the two; writing the groups can wait."""
    ask_source("save", rollout_id)
    return SESSION.unfinished(rollout_id)


def _check_versions(samples: Sequence[Sample]) -> None:
    """Nothing trains that an engine sampled without weights of this run.

    Raises:
        EngineError: an answer names no version, though weights were delivered.
    """
    if SESSION.version is None:
        return
    for sample in samples:
        if "default" in sample.weight_versions:
            raise EngineError(
                f"sample {sample.index} was sampled by weights of no version, and version {SESSION.version} "
                "was delivered: an engine answers that has its weights from its folder",
                place="rollouts",
                remedy="was it started again by others? --use-fault-tolerance replaces engines of the run",
            )


def _stamps(root: Path) -> dict[Path, tuple[int, int, int]]:
    """What tells a file that was written anew from the one before; the steps' folders are left out."""
    folders = [path for path in root.glob("*") if path.is_dir() and not path.name.startswith("step_")]
    files = [path for path in root.glob("*") if path.is_file()]
    files += [path for folder in folders for path in files_below(folder)]
    stats = ((path, path.stat()) for path in files)
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats}
