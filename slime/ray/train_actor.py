"""The trainer as an actor: one model under training whose weights lie in memory that the engine maps.

On CPU the parameters live there themselves; what lives elsewhere (another device, a base with adapters) is
copied there after each change.
Invariant: weights change only inside `train` and `load`, between the engine's `hold` and `update`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from slime.backends.base import Trainer
from slime.backends.hooks import load_hooks
from slime.backends.update import RolloutUpdate, train_on_rollouts
from slime.config import Config
from slime.config.plan import Plan
from slime.rollout.hooks import load_hook
from slime.serving.weights.shared import SharedWeights
from slime.train.batch import TrainSample
from slime.utils.parts import Part, declare, files_below

Result = TypeVar("Result")


def on_one_thread(method: Callable[..., Result]) -> Callable[..., Result]:
    """Run a method on the one thread of its object's `compute`, whichever thread Ray calls it from.

    Torch has a pool of OpenMP threads for each thread that computes; those of a second pool would outnumber
    the cores, and every operation would wait for a wake-up.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Result:
        result: Result = self.compute.submit(method, self, *args, **kwargs).result()
        return result

    return run


class TrainActor:
    """Holds a `Trainer` and the file that its weights live in."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slime-train")
        self._config = config
        self._plan = plan
        self._stopped = threading.Event()

    @on_one_thread
    def start(self) -> str:
        """Load the model; returns the path under which an engine on this machine maps the weights."""
        self._hooks = load_hooks(self._config.args(), load_hook)
        self._trainer, self._weights = _build(self._config, self._plan)
        return str(self._weights.path)

    def watch(self) -> str:
        """Lasts as long as the actor is wanted."""
        self._stopped.wait()
        return "was stopped"

    def precision(self) -> str:
        """What the trainer computes in: ``float32`` or ``bfloat16``."""
        return self._trainer.precision

    @on_one_thread
    def train(self, samples: Sequence[TrainSample]) -> RolloutUpdate:
        """All optimizer steps of one rollout step; metrics of each step, and of the whole."""
        started = time.perf_counter()
        self._trainer.wake()
        update = train_on_rollouts(
            self._trainer,
            samples,
            algorithm=self._config.algorithm,
            rollouts_per_step=self._plan.rollouts_per_optimizer_step,
            hooks=self._hooks,
        )
        self._trainer.sleep()
        self._publish()
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.tokens) for sample in samples)
        timing = {"perf/train_time": seconds, "perf/actor_train_tok_per_s": tokens / seconds}
        return replace(update, timing=timing)

    @on_one_thread
    def log_probs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probs of the response tokens under the current weights."""
        values = self._trainer.log_probs(samples)
        self._trainer.sleep()
        return values

    @on_one_thread
    def save(self, folder: str) -> list[Part]:
        """Write the trainer's state into a folder of a checkpoint's step, and declare its files."""
        self._trainer.save(Path(folder))
        return declare(Path(folder).parents[1], files_below(Path(folder)))

    @on_one_thread
    def save_hf(self, folder: str) -> None:
        """Write a Hugging Face folder."""
        self._trainer.save_hf(Path(folder))

    @on_one_thread
    def load(self, folder: str, restart_at: int | None) -> None:
        """Read the trainer's state, or its weights only; see `Trainer.load`."""
        self._trainer.load(Path(folder), restart_at=restart_at)
        self._publish()

    def stop(self) -> None:
        """Give up the shared weights and let `watch` return."""
        self._weights.unlink()
        self._stopped.set()

    def _publish(self) -> None:
        """Copy the weights to where the engine maps them, where they do not live there."""
        for name, weight in self._trainer.weights():
            view = self._weights.views[name]
            if weight.data_ptr() != view.data_ptr():
                view.copy_(weight)


def _build(config: Config, plan: Plan) -> tuple[Trainer, SharedWeights]:
    import torch

    from slime.backends.torch.trainer import TorchTrainer

    torch.use_deterministic_algorithms(config.train.deterministic_mode)
    trainer = TorchTrainer(
        config.model,
        config.algorithm,
        config.train,
        temperature=config.rollout.rollout_temperature or 1.0,  # greedy log-probs are those of temperature 1
        total_steps=plan.rollout_steps * plan.optimizer_steps_per_rollout_step,
    )
    weights = SharedWeights.create(trainer.weights())
    if trainer.device.type == "cpu":
        trainer.alias_parameters(weights.views)
    weights.hide()
    return trainer, weights
