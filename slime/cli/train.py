"""`slime train`: configuration to plan, plan to run, run to report.

Knows the order of things before and after the loop; the loop itself is ray/driver.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from slime.config import Config, load_config
from slime.config.plan import Plan, evaluation_steps, old_log_probs
from slime.config.problem import listed
from slime.errors import ConfigError, ModelError
from slime.observability.console import LiveConsole, PlainConsole, RunConsole, is_terminal
from slime.observability.doctor import FOLDER, Patient, answering_signal
from slime.observability.report import report_lines
from slime.observability.trackers import JsonLines, TensorBoard, Tracker, Trackers, drop_rows
from slime.ray.checkpoints import Checkpoint, Found, find, refuse_later_steps
from slime.rollout.eval import check_eval_hooks
from slime.rollout.hooks import check_hooks
from slime.rollout.inflight import IN_FLIGHT
from slime.serving.topology_flags import topology_of_run
from slime.train.memory import estimate_memory
from slime.utils.data import count_rows
from slime.utils.eval_config import build_eval_dataset_configs

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code (130 after a requested stop)."""
    config = load_config(argv)
    check_hooks(config.args())
    _check_evaluation(config)
    found = _find_checkpoint(config)
    checkpoint = found.checkpoint
    plan = config.plan(_prompts_in_data(config), _first_step(config, checkpoint))
    if config.model.save:
        refuse_later_steps(Path(config.model.save), plan.first_rollout_step, found.skipped)
    print("\n".join([*_preamble(config, plan, found), *_topology(config)]), flush=True)
    if config.run.dry_run:
        return 0
    run_dir = _run_dir(config)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.flags()))
    with _console() as console, _trackers(config, plan, run_dir) as tracker:
        stopped, places = _run(config, plan, checkpoint, run_dir, console, tracker)
    print("\n" + "\n".join(report_lines(run_dir, places)))
    return INTERRUPTED if stopped else 0


def _topology(config: Config) -> list[str]:
    """The topology of a file, and warnings about it.

    Raises:
        ConfigError: one that cannot be laid out.
    """
    topology, warnings = topology_of_run(config)
    served = [f"served                  {topology.line()}"] if config.serving.sglang_config else []
    return served + [f"warning: {problem.flag}: {problem.message} ({problem.remedy})" for problem in warnings]


def _run_dir(config: Config) -> Path:
    """The folder of the run, made; one that holds another run is refused unless this run goes on from it."""
    run_dir = Path(config.run.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    if (run_dir / "metrics.jsonl").exists() and config.model.load is None:
        raise ConfigError(
            "holds the metrics of another run",
            place=f"--run-dir {run_dir}",
            remedy="name another folder, or --load the run's checkpoint to go on with it",
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _run(
    config: Config,
    plan: Plan,
    checkpoint: Checkpoint | None,
    run_dir: Path,
    console: RunConsole,
    tracker: Tracker,
) -> tuple[bool, dict[str, Path | None]]:
    from slime.ray.actors import Actors
    from slime.ray.driver import Driver
    from slime.ray.environment import ray_session
    from slime.ray.lineage import Trained
    from slime.ray.supervision import StopFlag, StopRequested

    with ray_session(), StopFlag().installed() as stop, answering_signal(run_dir):
        patient = Patient(run_dir / FOLDER, "driver", IN_FLIGHT.describe)
        actors = Actors(config, run_dir, stop)
        try:
            console.phase("starting engine and trainer")
            actors.start(plan, checkpoint, console)
            goes_on = checkpoint is not None and plan.first_rollout_step == checkpoint.next_step
            trained = checkpoint.trained if checkpoint is not None and goes_on else Trained()
            result = Driver(config, plan, actors, console, tracker, run_dir, trained).run()
        except StopRequested:
            console.note("stopped before the first step")
            return True, {}
        finally:
            actors.close()
            patient.close()
            shutil.rmtree(run_dir / FOLDER)
    dump = config.run.save_debug_rollout_data
    places = {
        "checkpoint": result.checkpoint,
        "model folder": result.hf_folder,
        "rollouts": Path(dump).parent if dump else None,
    }
    return result.stopped, places


def _prompts_in_data(config: Config) -> int | None:
    files = listed(config.data.prompt_data)
    return sum(map(count_rows, files)) if files else None


def _check_evaluation(config: Config) -> None:
    """A bad ``--eval-config`` is found now and not after the first step."""
    datasets = build_eval_dataset_configs(config.args())
    check_eval_hooks(datasets)
    for dataset in datasets:
        count_rows(dataset.path)


def _first_step(config: Config, checkpoint: Checkpoint | None) -> int:
    if config.model.start_rollout_id is not None:
        return config.model.start_rollout_id
    return checkpoint.next_step if checkpoint else 0


def _find_checkpoint(config: Config) -> Found:
    load, save = config.model.load, config.model.save
    return find(Path(load), save=Path(save) if save else None) if load else Found(None)


def _preamble(config: Config, plan: Plan, found: Found) -> list[str]:
    warnings = [f"warning: {p.flag}: {p.message} ({p.remedy})" for p in config.warnings]
    old = old_log_probs(config.algorithm, plan.optimizer_steps_per_rollout_step)
    return [*plan.lines(), f"old log-probs           {old}", *_memory(config), *found.lines(), *warnings]


def _memory(config: Config) -> list[str]:
    """What the trainer and a critic will need, or why that is not known; it never stops a run."""
    algorithm, model, rollout = config.algorithm, config.model, config.rollout
    if config.run.debug_rollout_only or model.hf_checkpoint is None:
        return []
    base_is_reference = config.train.lora_rank and model.ref_load in (None, model.hf_checkpoint)
    prompt, response = rollout.rollout_max_prompt_len, rollout.rollout_max_response_len
    longest = rollout.rollout_max_context_len or (prompt + response if prompt and response else None)
    has_kl = bool(algorithm.use_kl_loss or algorithm.kl_coef)
    try:
        trainer = estimate_memory(
            Path(model.hf_checkpoint),
            config.train,
            has_reference=has_kl and not base_is_reference,
            longest_row=longest,
        )
        lines = [f"memory of the trainer   {trainer.line()}"]
        if config.has_critic:
            folder = Path(config.critic.load or model.hf_checkpoint)
            whole = replace(config.train, lora_rank=0)
            critic = estimate_memory(folder, whole, has_reference=False, longest_row=longest)
            lines.append(f"memory of the critic    {replace(critic, logits=0).line()}")
    except ModelError as error:
        return [f"memory of the trainer   not known: {error.message} ({error.place})"]
    return lines


@contextmanager
def _console() -> Iterator[RunConsole]:
    if is_terminal():
        with LiveConsole() as live:
            yield live
    else:
        yield PlainConsole()


@contextmanager
def _trackers(config: Config, plan: Plan, run_dir: Path) -> Iterator[Tracker]:
    metrics, first = run_dir / "metrics.jsonl", plan.first_rollout_step
    evaluates = first in evaluation_steps(config.evaluation, first, plan.rollout_steps)
    drop_rows(metrics, step=first, evaluation=first if evaluates else first + 1)
    trackers: list[Tracker] = [JsonLines(metrics)]
    if config.run.use_tensorboard:
        folder = Path(config.run.tb_project_name or run_dir / "tensorboard")
        trackers.append(TensorBoard(folder / (config.run.tb_experiment_name or "")))
    both = Trackers(trackers)
    try:
        yield both
    finally:
        both.close()
