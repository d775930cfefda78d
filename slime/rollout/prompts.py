"""The prompts of a run: one data set, or several mixed by weight, as one endless stream.

Invariant: each set keeps its own epoch, order and position; `restore` goes on exactly where `state` was. With
changed weights the sets keep their positions and the new shares hold from there on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.errors import CheckpointError
from slime.rollout.mixture import Interleave
from slime.rollout.prompt_stream import PromptStream
from slime.utils.data import Dataset
from slime.utils.data_files import split_slice
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
AFRESH = "or start the data from its beginning with --start-rollout-id 0"


class Prompts:
    """Streams and the order in which they take turns.

    Args:
        weights: of each stream, in any unit.
        seed: of ties between streams.
    """

    def __init__(self, streams: Sequence[PromptStream], weights: Sequence[float], seed: int) -> None:
        self.streams = list(streams)
        self._weights = list(weights)
        self._seed = seed
        self._interleave = Interleave(weights, seed)

    def __len__(self) -> int:
        """Prompts of all sets."""
        return sum(map(len, self.streams))

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    @property
    def samples(self) -> list[Sample]:
        """The samples of all sets, set by set."""
        return list(itertools.chain.from_iterable(stream.dataset.samples for stream in self.streams))

    @property
    def epoch_id(self) -> int:
        """Whole passes over the set that has had the fewest."""
        return min(stream.epoch_id for stream in self.streams)

    @property
    def given(self) -> int:
        """Prompts given out so far."""
        return sum(stream.given for stream in self.streams)

    def draw(self) -> PromptStream:
        """The stream whose turn it is; the caller takes a prompt from it."""
        return self.streams[self._interleave.next()]

    def state(self) -> dict[str, Any]:
        """Where every stream stands, as JSON."""
        return {
            "sets": [self._identity(stream) | stream.state() for stream in self.streams],
            "weights": self._weights,
            "counts": self._interleave.counts,
        }

    def restore(self, state: dict[str, Any] | None, path: Path) -> None:
        """Go on from a state.

        Raises:
            CheckpointError: it was written for other data; names both.
        """
        was = [{k: v for k, v in held.items() if k in _IDENTITY} for held in (state or {}).get("sets", [])]
        now = [self._identity(stream) for stream in self.streams]
        if state is None or was != now:
            raise other_data(path, was or "no data set", now)
        for stream, held in zip(self.streams, state["sets"], strict=True):
            stream.restore(held)
        self._interleave = Interleave(self._weights, self._seed)
        if state["weights"] == self._weights:
            self._interleave.counts = list(state["counts"])
        else:
            logger.warning(
                "--prompt-data-weights were %s and are %s now: each set goes on from its position, and the "
                "new shares hold from here on",
                state["weights"],
                self._weights,
            )

    def _identity(self, stream: PromptStream) -> dict[str, Any]:
        """What the order of its prompts depends on."""
        seed = self._seed if stream.shuffled else None
        return {"name": stream.name, "rows": len(stream), "shuffled": stream.shuffled, "seed": seed}


_IDENTITY = ("name", "rows", "shuffled", "seed")


def other_data(path: Path, was: object, now: object) -> CheckpointError:
    """The error of a state that belongs to other data."""
    return CheckpointError(
        f"was written for {was}, this run has {now}",
        place=str(path),
        remedy=f"resume with the same --prompt-data, --rollout-shuffle and --rollout-seed; {AFRESH}",
    )


def load_prompts(args: Any) -> Prompts | None:
    """The prompts of ``--prompt-data``; None without a data set.

    Args:
        args: any object; absent attributes mean the flag's default.

    Raises:
        DataError, ModelError: see `Dataset` and `load_tokenizer`.
    """
    given = getattr(args, "prompt_data", None)
    if not given or not getattr(args, "rollout_global_dataset", True):
        return None
    paths = [str(given)] if isinstance(given, str | Path) else list(given)
    seed, shuffled = rollout_seed(args), bool(getattr(args, "rollout_shuffle", False))
    streams = [
        PromptStream(name, dataset, shuffled=shuffled, marks=len(paths) > 1)
        for name, dataset in zip(_names(paths), _datasets(args, paths), strict=True)
    ]
    weights = getattr(args, "prompt_data_weights", None) or [float(len(stream)) for stream in streams]
    return Prompts(streams, weights, seed)


def rollout_seed(args: Any) -> int:
    """``--rollout-seed``."""
    return int(getattr(args, "rollout_seed", 42))


def _names(paths: Sequence[str]) -> list[str]:
    """The file's name without its type; where that is not unique, as much of the path as tells them apart."""
    stems = [split_slice(path)[0].stem for path in paths]
    return [path if stems.count(stem) > 1 else stem for path, stem in zip(paths, stems, strict=True)]


def _datasets(args: Any, paths: Sequence[str]) -> list[Dataset]:
    template = bool(getattr(args, "apply_chat_template", False))
    max_length = _max_prompt_len(args)
    needs_tokenizer = template or max_length is not None
    tokenizer = load_tokenizer(getattr(args, "hf_checkpoint", None)) if needs_tokenizer else None
    return [
        Dataset(
            path,
            tokenizer,
            None,
            max_length,
            prompt_key=getattr(args, "input_key", None) or "input",
            label_key=getattr(args, "label_key", None),
            tool_key=getattr(args, "tool_key", None),
            metadata_key=getattr(args, "metadata_key", None) or "metadata",
            seed=rollout_seed(args),
            apply_chat_template=template,
            apply_chat_template_kwargs=getattr(args, "apply_chat_template_kwargs", None),
        )
        for path in paths
    ]


def _max_prompt_len(args: Any) -> int | None:
    """--rollout-max-prompt-len, and room for one token below --rollout-max-context-len."""
    context = getattr(args, "rollout_max_context_len", None)
    limits = [getattr(args, "rollout_max_prompt_len", None), context - 1 if context else None]
    return min((limit for limit in limits if limit is not None), default=None)
