"""The trainer as an actor: one model under training whose weights lie in memory that the engine maps.

Alone on CPU the parameters live there themselves; what lives elsewhere (another device, a base with adapters,
shards of several ranks) is copied there after each change.
Invariant: weights change only inside `train` and `load`, between the engine's `hold` and `update`.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slime.backends.base import Critic
from slime.backends.critic_update import CriticTraining
from slime.backends.hooks import TrainHooks, load_hooks
from slime.backends.torch.ranks import (
    LOOPBACK,
    Ranks,
    find_store,
    join,
    local_device,
    naming_lost_ranks,
    open_store,
)
from slime.backends.update import RolloutUpdate, train_on_rollouts
from slime.config import Config
from slime.config.plan import Plan
from slime.errors import CheckpointError
from slime.observability.doctor import patient_of_environment
from slime.ray.delivery import Delivery, TrainerSharing, Way
from slime.rollout.hooks import load_hook
from slime.rollout.inflight import IN_FLIGHT
from slime.serving.weights.disk import AfterWrite
from slime.serving.weights.factory import make_weight_sync
from slime.serving.weights.probe import TOLERANCE, Probe
from slime.serving.weights.shared import SharedWeights
from slime.serving.weights.sync import UpdateReport, WeightSync
from slime.train.batch import TrainSample
from slime.train.carry import Carry, Waiting, from_json, to_json
from slime.utils.parts import Part, declare, files_below

if TYPE_CHECKING:
    from slime.backends.torch.trainer import TorchTrainer

Result = TypeVar("Result")
CRITIC = "critic"
"""Folder of the critic's state inside the trainer's."""
PROBE_TOKENS = 32
"""Length of the row by which engines are compared with the trainer."""
WAITING = "waiting.json"
"""File there of the rows that wait for a full optimizer step."""


def on_one_thread(method: Callable[..., Result]) -> Callable[..., Result]:
    """Run a method on the one thread of its object's `compute`, whichever thread Ray calls it from.

    Torch has a pool of OpenMP threads for each thread that computes; those of a second pool would outnumber
    the cores, and every operation would wait for a wake-up.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Result:
        doing = IN_FLIGHT.track(f"trainer rank {self.ranks.rank}", method.__name__)
        with doing, naming_lost_ranks(self.ranks, method.__name__):
            result: Result = self.compute.submit(method, self, *args, **kwargs).result()
        return result

    return run


class TrainActor:
    """One rank of a `Trainer`; the first of them holds the file that the weights live in.

    All ranks get the same calls. What only one can give, the first gives.
    """

    def __init__(self, config: Config, plan: Plan, rank: int = 0) -> None:
        size = config.train.actor_num_gpus_per_node
        self.ranks = Ranks(rank, size)
        self.compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slime-train")
        self._config = config
        self._plan = plan
        self._stopped = threading.Event()
        self._patient = patient_of_environment(IN_FLIGHT.describe)
        self._sharing = TrainerSharing(shares_memory=False, engine_dtype="float32", sleeps=False)
        self._weights: SharedWeights | None = None
        self._syncs: dict[Way, WeightSync] = {}
        self._waiting: Sequence[Waiting] = ()

    def meet(self) -> int:
        """Open the place where the ranks meet, on loopback; returns its port."""
        self._store = open_store(LOOPBACK, self.ranks.size, self._timeout)
        return self._store.port

    @on_one_thread
    def start(self, port: int | None, sharing: TrainerSharing) -> None:
        """Load the model.

        Args:
            port: where several ranks meet, from `meet` of the first.
        """
        self._sharing = sharing
        self._hooks = load_hooks(self._config.args(), load_hook)
        device = local_device(self.ranks)
        if port is not None:
            store = self._store if self.ranks.is_first else find_store(LOOPBACK, port, self._timeout)
            join(self.ranks, store, device=device, timeout=self._timeout)
        self._trainer = _trainer(self._config, self._plan, self._hooks, self.ranks, device)
        self._critic = _critic(self._config, self._plan, self.ranks, device)
        if sharing.shares_memory:
            self._weights = _shared_weights(self._trainer, self.ranks)
            self._publish()
        self._rest()

    def watch(self) -> str:
        """Lasts as long as the actor is wanted."""
        self._stopped.wait()
        return "was stopped"

    def precision(self) -> str:
        """What the trainer computes in: ``float32`` or ``bfloat16``."""
        return self._trainer.precision

    @on_one_thread
    def train(self, step: int, samples: Sequence[TrainSample]) -> RolloutUpdate:
        """All optimizer steps of rollout step `step`; metrics of each, and of the whole."""
        started = time.perf_counter()
        with self._awake():
            update = train_on_rollouts(
                self._trainer,
                samples,
                algorithm=self._config.algorithm,
                rollouts_per_step=self._plan.rollouts_per_optimizer_step,
                hooks=replace(self._hooks, rollout_id=step),
                critic=self._critic_training(step),
                carry=self._carry(step),
                policy_version=step if self._config.keeps_rollouts else 0,
            )
            self._waiting = update.waiting
            self._publish()
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.tokens) for sample in samples)
        timing = {"perf/train_time": seconds, "perf/actor_train_tok_per_s": tokens / seconds}
        return replace(update, timing=timing, waiting=())

    @on_one_thread
    def log_probs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probs of the response tokens under the current weights."""
        with self._awake():
            return self._trainer.log_probs(samples)

    @on_one_thread
    def deliver(self, delivery: Delivery) -> UpdateReport:
        """Give the weights to engines; what failed is in the report.

        Raises:
            ModelError: the weights are not those of the engines' model.
        """
        sync = self._syncs.get(delivery.way)
        if sync is None:
            sync = self._syncs[delivery.way] = self._make_sync(delivery.way)
        sync.connect(delivery.endpoints)
        return sync.update(delivery.version, delivery.pause, released=delivery.released)

    @on_one_thread
    def save(self, folder: str) -> list[Part]:
        """Write the trainer's state into a folder of a checkpoint's step, and declare its files."""
        with self._awake():
            self._trainer.save(Path(folder))
            if self._critic is not None:
                self._critic.save(Path(folder) / CRITIC)
        if not self.ranks.is_first:
            return []
        if self._waiting:
            (Path(folder) / WAITING).write_text(to_json(self._waiting), encoding="utf-8")
        return declare(Path(folder).parents[1], files_below(Path(folder)))

    @on_one_thread
    def save_hf(self, folder: str) -> None:
        """Write a Hugging Face folder."""
        with self._awake():
            self._trainer.save_hf(Path(folder))

    @on_one_thread
    def save_critic(self, folder: str) -> None:
        """Write a Hugging Face folder of the critic."""
        assert self._critic is not None
        with self._awake():
            self._critic.save_hf(Path(folder))

    @on_one_thread
    def load(self, folder: str, restart_at: int | None) -> None:
        """Read the state of trainer and critic.

        Args:
            restart_at: take the weights only, with fresh optimizers at this rollout step of the schedule; a
                critic that is not there then starts anew.

        Raises:
            CheckpointError: see `Trainer.load`; or there is no critic to go on with.
        """
        with self._awake():
            self._load(Path(folder), restart_at)
            self._publish()

    def stop(self) -> None:
        """Give up what is shared with engines and let `watch` return."""
        for sync in self._syncs.values():
            sync.close()
        if self._weights is not None:
            self._weights.unlink()
        self._stopped.set()

    def _load(self, place: Path, restart_at: int | None) -> None:
        plan = self._plan
        self._trainer.load(place, restart_at=None if restart_at is None else plan.actor_steps(restart_at))
        if self._critic is not None and ((place / CRITIC).is_dir() or restart_at is None):
            _check_has_critic(place)
            self._critic.load(
                place / CRITIC, restart_at=None if restart_at is None else plan.critic_steps(restart_at)
            )
        if restart_at is None and (place / WAITING).is_file():
            self._waiting = from_json((place / WAITING).read_text(encoding="utf-8"))

    def _carry(self, step: int) -> Carry | None:
        if self._config.data.incomplete_step != "carry":
            return None
        return Carry(waiting=self._waiting, is_last=step + 1 == self._plan.rollout_steps)

    def _critic_training(self, step: int) -> CriticTraining | None:
        if self._critic is None:
            return None
        alone = step < self._plan.critic_only_rollout_steps
        return CriticTraining(critic=self._critic, epochs=self._plan.critic_epochs, alone=alone)

    def _make_sync(self, way: Way) -> WeightSync:
        folder = self._config.model.hf_checkpoint or ""
        return make_weight_sync(
            self._config.weights,
            source=self._trainer,
            engine_kind=way.kind,
            hf_checkpoint=folder,
            timeout=self._config.run.update_timeout,
            one_machine=way.one_machine,
            is_first=self.ranks.is_first,
            shared=self._weights,
            aliases=way.aliases,
            after_write=self._after_write(),
            probe=self._probe() if self._config.weights.check_weight_update_equal else None,
        )

    def _after_write(self) -> AfterWrite | None:
        """The user's hook behind a version on disk."""
        path = self._config.weights.custom_update_weight_post_write_path
        if path is None:
            return None
        hook, args = load_hook(path, "custom_update_weight_post_write_path"), self._config.args()
        return lambda folder, endpoints: hook(args, str(folder), list(endpoints))

    def _probe(self) -> Probe:
        """Some tokens of the vocabulary, in the order of their numbers."""
        tokens = range(min(PROBE_TOKENS, self._trainer.vocabulary))
        precisions = {self._trainer.precision, self._sharing.engine_dtype}
        return Probe(self._score, tokens, TOLERANCE["bfloat16" if "bfloat16" in precisions else "float32"])

    def _score(self, row: Sequence[int]) -> Sequence[float]:
        """Log-probs of the tokens of a row but the first, by the policy, which must be on its device."""
        return self._trainer.log_probs([_unrewarded(row)])[0]

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Use the device, and give it up afterwards where engines need it."""
        self._trainer.wake()
        yield
        self._rest()

    def _rest(self) -> None:
        if not self._sharing.sleeps:
            return
        self._trainer.sleep()
        if self._critic is not None:
            self._critic.sleep()

    def _publish(self) -> None:
        """Copy the weights to where the engine maps them, where they do not live there."""
        if not self._sharing.shares_memory:
            return
        for name, weight in self._trainer.weights():
            view = self._weights.views[name] if self._weights else weight
            if weight.data_ptr() != view.data_ptr():
                view.copy_(weight)

    @property
    def _timeout(self) -> float:
        return 60.0 * self._config.train.distributed_timeout_minutes


def _trainer(
    config: Config, plan: Plan, hooks: TrainHooks, ranks: Ranks, device: torch.device
) -> TorchTrainer:
    from slime.backends.torch.trainer import TorchTrainer

    torch.use_deterministic_algorithms(config.train.deterministic_mode)
    return TorchTrainer(
        config.model,
        config.algorithm,
        config.train,
        temperature=config.rollout.rollout_temperature or 1.0,  # greedy log-probs are those of temperature 1
        total_steps=plan.actor_steps(plan.rollout_steps),
        hooks=hooks,
        device=str(device),
        ranks=ranks,
    )


def _shared_weights(trainer: TorchTrainer, ranks: Ranks) -> SharedWeights | None:
    """Where the engine finds the weights; parameters that are whole and on CPU move there."""
    shapes = ((name, weight.to("meta")) for name, weight in trainer.weights())
    if not ranks.is_first:
        collections.deque(shapes, maxlen=0)
        return None
    weights = SharedWeights.reserve(shapes)
    if ranks.size == 1 and trainer.device.type == "cpu":
        trainer.alias_parameters(weights.views)
    weights.hide()
    return weights


def _unrewarded(tokens: Sequence[int]) -> TrainSample:
    """A row whose tokens but the first are a response."""
    length = len(tokens) - 1
    return TrainSample(
        index=0,
        rollout_id=0,
        group_index=0,
        tokens=tuple(tokens),
        response_length=length,
        loss_mask=(1,) * length,
        rollout_log_probs=None,
        reward=0.0,
    )


def _critic(config: Config, plan: Plan, ranks: Ranks, device: torch.device) -> Critic | None:
    if not config.has_critic:
        return None
    from slime.backends.torch.critic import TorchCritic

    return TorchCritic(
        config.model,
        config.critic,
        config.train,
        value_clip=config.algorithm.value_clip,
        total_steps=plan.critic_steps(plan.rollout_steps),
        device=str(device),
        ranks=ranks,
    )


def _check_has_critic(folder: Path) -> None:
    if not (folder / CRITIC).is_dir():
        raise CheckpointError(
            "it holds no critic: the run that wrote it did not train one",
            place=str(folder),
            remedy="--start-rollout-id 0 takes its weights only and starts a new critic",
        )
