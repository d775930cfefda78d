"""Data sources: where groups of samples come from, with ids set, and where unfinished ones go back to.

Invariant: `index`, `group_index` and `rollout_id` are unique over the life of a run, resumes included; after
`load` the next groups are exactly those that would have followed the `save`. State is JSON, never pickle.
"""

from __future__ import annotations

import abc
import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.errors import CheckpointError, ConfigError, DataError
from slime.rollout.base_types import Group
from slime.rollout.buffer_filter import DEST, take_from_buffer
from slime.rollout.groups import rollouts_of
from slime.rollout.hooks import hook_name, load_hook
from slime.rollout.prompt_stream import Prompt
from slime.rollout.prompts import AFRESH, Prompts, load_prompts, other_data
from slime.rollout.sample_json import group_from_json, group_to_json
from slime.utils.data import Dataset
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
STATE_VERSION = 2
Buffer = list[Group]


class DataSource(abc.ABC):
    """What the rollout layer needs of a data source."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """The next `num_samples` groups, each with a sample for every rollout of its prompt."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back, to give them out again."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state after this rollout step below ``args.save``."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Read the state after this rollout step from ``args.load``."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Prompts in one epoch."""


class RolloutDataSource(DataSource):
    """Prompts of ``--prompt-data`` in order, epoch after epoch, several files mixed; blank samples without.

    Args:
        args: any object; absent attributes mean the flag's default.

    Raises:
        DataError, ModelError: see `Dataset` and `load_tokenizer`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.n_samples_per_prompt = int(getattr(args, "n_samples_per_prompt", None) or 1)
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.prompts = load_prompts(args)

    @property
    def dataset(self) -> Dataset | Prompts | None:
        """The prompts of one epoch: ``len``, index, ``samples``; None without a data set."""
        if self.prompts is None or len(self.prompts.streams) > 1:
            return self.prompts
        return self.prompts.streams[0].dataset

    @property
    def epoch_id(self) -> int:
        """Whole passes over the data; of several sets, over the one that is furthest behind."""
        return self.prompts.epoch_id if self.prompts is not None else 0

    @property
    def sample_offset(self) -> int:
        """Prompts given out beyond those passes."""
        return self.prompts.given - self.epoch_id * len(self) if self.prompts is not None else 0

    def __len__(self) -> int:
        return len(self.prompts) if self.prompts is not None else 0

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next groups; a data set is begun again as often as needed."""
        return [self._group(self._next_prompt()) for _ in range(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        """Not possible without a buffer.

        Raises:
            DataError: always, unless there is nothing to add.
        """
        if samples:
            raise DataError(
                f"{type(self).__name__} cannot take groups back",
                place="--data-source-path",
                remedy="use slime.rollout.data_source.RolloutDataSourceWithBuffer",
            )

    def save(self, rollout_id: int) -> None:
        """Write ``<args.save>/rollout/data_source_<rollout_id>.json``.

        Raises:
            CheckpointError: --save is unset, or the file cannot be written.
        """
        path = _state_path(self.args, "save", rollout_id)
        partial = path.with_suffix(".partial")
        text = json.dumps(self._state())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"cannot be written: {error.strerror}", place=str(path), remedy="check --save and the disk"
            ) from error

    def load(self, rollout_id: int | None = None) -> None:
        """Read back what `save` wrote; None takes the newest state, a negative id starts afresh.

        Without --load, nothing happens.

        Raises:
            CheckpointError: no such state, not readable, or of another data set.
        """
        if not getattr(self.args, "load", None):
            return
        if rollout_id is None:
            rollout_id = _newest(Path(self.args.load))
        if rollout_id < 0:
            return
        path = _state_path(self.args, "load", rollout_id)
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            self._restore(state, path)
        except OSError as error:
            raise CheckpointError(
                f"no data position of rollout {rollout_id}: {error.strerror}", place=str(path), remedy=AFRESH
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"is damaged: {error!r}", place=str(path), remedy=AFRESH) from error

    def _state(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "prompts": self.prompts.state() if self.prompts is not None else None,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
        }

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        if state["version"] != STATE_VERSION:
            raise CheckpointError(
                f"has version {state['version']}, this slime reads {STATE_VERSION}",
                place=str(path),
                remedy=f"resume with the slime that wrote it, {AFRESH}",
            )
        if self.prompts is not None:
            self.prompts.restore(state["prompts"], path)
        elif state["prompts"] is not None:
            raise other_data(path, "a data set", "none")
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = state["metadata"]

    def _next_prompt(self) -> Prompt:
        return self.prompts.draw().next() if self.prompts is not None else Prompt(None, Sample())

    def _group(self, prompt: Prompt) -> Group:
        group = [copy.deepcopy(prompt.sample) for _ in range(self.n_samples_per_prompt)]
        for sample in group:
            sample.group_index = self.sample_group_index
            sample.index = sample.rollout_id = self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, with a buffer of groups that were taken back; they are given out first."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: Buffer = []
        path = getattr(args, "buffer_filter_path", None)
        self._filter: Callable[..., Any] = load_hook(path, DEST) if path else pop_first

    def get_samples(self, num_samples: int) -> list[Group]:
        """Groups that the buffer filter takes out of the buffer, then new ones.

        Raises:
            HookError: as `take_from_buffer`.
        """
        taken = take_from_buffer(self._filter, self.args, self.buffer, num_samples) if self.buffer else []
        return [*taken, *super().get_samples(num_samples - len(taken))]

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups, flat or nested, at the end of the buffer.

        Raises:
            DataError: a group that does not hold `n_samples_per_prompt` rollouts; nothing is added then.
        """
        for group in samples:
            count = len(rollouts_of(group)) if isinstance(group, list) else 0
            if count != self.n_samples_per_prompt:
                raise DataError(
                    f"a group of {count} rollouts was added, groups have {self.n_samples_per_prompt}",
                    place=f"group {_group_index(group)}",
                    remedy="add whole groups: a list of groups, each with --n-samples-per-prompt rollouts",
                )
        self.buffer.extend(samples)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "buffer": [group_to_json(group) for group in self.buffer]}

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        super()._restore(state, path)
        self.buffer = [group_from_json(group) for group in state["buffer"]]


def check_takes_back(args: Any, source: Any) -> None:
    """Check before a step that a surplus of groups has somewhere to go.

    Raises:
        ConfigError: over-sampling, and a source that takes no groups back.
    """
    surplus = getattr(args, "over_sampling_batch_size", None) or 0
    if surplus <= args.rollout_batch_size or _takes_back(source):
        return
    raise ConfigError(
        f"{surplus} groups for a batch of {args.rollout_batch_size} leave some over, and "
        f"{hook_name(type(source))} cannot take groups back",
        place="--over-sampling-batch-size, --data-source-path",
        remedy="leave --over-sampling-batch-size unset, or use a data source with a buffer, such as "
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    )


def check_can_take_back(source: Any) -> None:
    """Check that groups in flight have somewhere to go when a run ends.

    Raises:
        ConfigError: the source takes no groups back.
    """
    if not _takes_back(source):
        raise ConfigError(
            f"fully asynchronous rollouts are in flight at the end of a run, and {hook_name(type(source))} "
            "cannot take groups back",
            place="--data-source-path",
            remedy="use a data source with a buffer, such as "
            "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        )


def _takes_back(source: Any) -> bool:
    return getattr(type(source), "add_samples", None) not in (None, RolloutDataSource.add_samples)


def pop_first(args: Any, rollout_id: int | None, buffer: Buffer, num_samples: int) -> Buffer:
    """Take the oldest groups out of the buffer (the default buffer filter)."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def _state_path(args: Any, flag: str, rollout_id: int) -> Path:
    folder = getattr(args, flag, None)
    if not folder:
        raise CheckpointError("no folder to save to", place=f"--{flag}", remedy=f"set --{flag}")
    return Path(folder) / "rollout" / f"data_source_{rollout_id}.json"


def _newest(folder: Path) -> int:
    """Rollout id of the newest state in a checkpoint folder, -1 when there is none."""
    names = [path.stem.rpartition("_")[2] for path in (folder / "rollout").glob("data_source_*.json")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def _group_index(group: Any) -> int | None:
    first = group
    while isinstance(first, list) and first:
        first = first[0]
    return first.group_index if isinstance(first, Sample) else None
