"""The user's conversion of samples to rows of training, ``--custom-convert-samples-to-train-data-path``.

Invariant: what the hook gives is checked here, once, by name: one entry a row in every list, per-token lists
as long as the response, and every rollout that votes has a row (law 5). Group and policy version come from
the samples by their ids, never by position (law 2). Knows nothing of estimators.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from slime.rollout.boundary import check_trainable, vocabulary_size
from slime.rollout.hook_calls import call_step_hook
from slime.rollout.hooks import flag_name, load_hook
from slime.train.batch import Reward
from slime.train.rewards import check_listed, read_reward
from slime.utils.types import Sample
from slime.utils.user_function import UserFunction

DEST = "custom_convert_samples_to_train_data_path"
REQUIRED = (
    "tokens",
    "response_lengths",
    "rewards",
    "raw_reward",
    "truncated",
    "sample_indices",
    "loss_masks",
)
OPTIONAL = ("rollout_ids", "rollout_mask_sums", "group_indices", "rollout_log_probs", "teacher_log_probs")
UNREAD = ("total_lengths", "round_number", "source_names", "metadata")
"""Lists that other trainers read and ours need not."""


@dataclass(frozen=True, slots=True)
class ConvertedRow:
    """One row of the hook's.

    Attributes:
        sample: the row, with all ids.
        reward: taken as it is.
        sources: the samples that it was made of, by their ids.
    """

    sample: Sample
    reward: Reward
    sources: Sequence[Sample]


def converted_rows(samples: Sequence[Sample], args: Any) -> list[ConvertedRow] | None:
    """The rows that the user's function makes of the samples that vote, or None where there is no function.

    The hook is ``(args, samples) -> dict`` of lists with one entry a row: `REQUIRED`, and any of `OPTIONAL`.
    ``tokens`` are whole rows; ``loss_masks``, ``rollout_log_probs`` and ``teacher_log_probs`` cover their
    last ``response_lengths`` tokens. ``rollout_mask_sums`` are the trained tokens of the row's whole rollout.

    Raises:
        HookError: it raised, or broke any of this; names hook, field, sample and lengths.
        DeadlineError: it took longer than ``--rollout-timeout``.
        RewardError: a reward that is none, or does not fit its row.
    """
    path = getattr(args, DEST, None)
    if not path or not samples:
        return None
    hook = UserFunction(f"{flag_name(DEST)} ({path})", load_hook(path, DEST))
    columns = _columns(hook, call_step_hook(hook, args, args, list(samples), place=f"{len(samples)} samples"))
    ids = _Ids.of(samples)
    vocab_size = vocabulary_size(getattr(args, "hf_checkpoint", None))
    rows = [
        _row(hook, {name: column[k] for name, column in columns.items()}, ids, vocab_size)
        for k in range(len(columns["tokens"]))
    ]
    _check_teacher(hook, rows, args)
    _check_groups(hook, rows)
    _check_mask_sums(hook, rows, columns.get("rollout_mask_sums"))
    _check_nothing_lost(hook, rows, samples)
    return rows


@dataclass(frozen=True, slots=True)
class _Ids:
    """The samples by what identifies them."""

    by_rollout: Mapping[int, Sequence[Sample]]
    by_index: Mapping[int, Sequence[Sample]]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Ids:
        by_rollout: dict[int, list[Sample]] = defaultdict(list)
        by_index: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            assert sample.rollout_id is not None
            by_rollout[sample.rollout_id].append(sample)
            if sample.index is not None:
                by_index[sample.index].append(sample)
        return cls(by_rollout, by_index)

    def sources(self, hook: UserFunction, index: int, rollout: int | None) -> Sequence[Sample]:
        """The samples of a row: of its rollout, and else of its sample index."""
        known = self.by_rollout.get(rollout) if rollout is not None else None
        if known is not None:
            return [sample for sample in known if sample.index == index] or known
        if index not in self.by_index:
            of_rollout = "" if rollout is None else f" and none has the rollout_ids entry {rollout}"
            raise hook.broke(
                f"no sample has the sample_indices entry {index}{of_rollout}",
                "keep the ids of the samples: rollout_ids from sample.rollout_id",
            )
        return self.by_index[index]


def _columns(hook: UserFunction, answer: Any) -> dict[str, list[Any]]:
    """The lists of the answer, plain, all of one length."""
    if not isinstance(answer, Mapping):
        raise hook.broke(f"returned {type(answer).__name__}, expected a dict of lists", _KEYS)
    given = {name: value for name, value in answer.items() if value is not None}
    missing = [name for name in REQUIRED if name not in given]
    strange = [repr(name) for name in given if name not in (*REQUIRED, *OPTIONAL, *UNREAD)]
    if missing:
        raise hook.broke(f"returned a dict without {', '.join(missing)}", _KEYS)
    if strange:
        raise hook.broke(f"returned {', '.join(strange)}, which training does not read", _KEYS)
    columns = {name: _plain(given[name]) for name in (*REQUIRED, *OPTIONAL) if name in given}
    for name, column in columns.items():
        if not isinstance(column, list):
            raise hook.broke(f"{name} is of type {type(column).__name__}, expected a list of one entry a row")
        if len(column) != len(columns["tokens"]):
            raise hook.broke(f"{name} has {len(column)} entries, tokens has {len(columns['tokens'])}")
    return columns


def _plain(value: Any) -> Any:
    """Lists of numbers, also where they came as arrays or tensors."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _row(hook: UserFunction, entry: Mapping[str, Any], ids: _Ids, vocab_size: int | None) -> ConvertedRow:
    index = _whole(hook, "sample_indices", entry["sample_indices"], "a row")
    place = f"sample {index}"
    rollout, group = (
        None if name not in entry else _whole(hook, name, entry[name], place)
        for name in ("rollout_ids", "group_indices")
    )
    sources = ids.sources(hook, index, rollout)
    sample = Sample(
        index=index,
        rollout_id=_only(hook, "rollout_id", rollout, sources, "rollout_ids"),
        group_index=_only(hook, "group_index", group, sources, "group_indices"),
        tokens=_numbers(hook, "tokens", entry, place, Integral) or [],
        response_length=_whole(hook, "response_lengths", entry["response_lengths"], place),
        loss_mask=_numbers(hook, "loss_masks", entry, place, Real),
        rollout_log_probs=_numbers(hook, "rollout_log_probs", entry, place, Real),
        teacher_log_probs=_numbers(hook, "teacher_log_probs", entry, place, Real),
        metadata={"raw_reward": _raw_reward(hook, entry["raw_reward"], place)},
        status=Sample.Status.TRUNCATED if _flag(hook, entry["truncated"], place) else Sample.Status.COMPLETED,
    )
    check_trainable(sample, hook.name, vocab_size=vocab_size, needs_log_probs=False)
    mask = [int(value) for value in sample.loss_mask or ()]
    sample.loss_mask = mask
    reward = read_reward(entry["rewards"], place=f"{hook.name}, {place}")
    check_listed(reward, mask, place=f"{hook.name}, {place}")
    return ConvertedRow(sample, reward, sources)


def _only(hook: UserFunction, name: str, given: int | None, sources: Sequence[Sample], needed: str) -> int:
    """The id that the dict gives, or the only one that the row's samples have."""
    if given is not None:
        return given
    found = sorted({getattr(sample, name) for sample in sources})
    if len(found) > 1:
        raise hook.broke(
            f"the sample_indices entry {sources[0].index} is that of samples with {name} "
            f"{' and '.join(map(str, found))}",
            f"add {needed} to the dict: one entry a row, sample.{name}",
        )
    return int(found[0])


def _whole(hook: UserFunction, name: str, value: Any, place: str) -> int:
    if not isinstance(value, Integral):
        raise hook.broke(f"{place}: {name} is {value!r:.80}, expected an integer")
    return int(value)


def _numbers(
    hook: UserFunction, name: str, entry: Mapping[str, Any], place: str, kind: type
) -> list[Any] | None:
    """One list a row; None where the row has none, which only optional ones may lack."""
    values = entry.get(name)
    if values is None and name in OPTIONAL:
        return None
    if not isinstance(values, list):
        raise hook.broke(f"{place}: {name} is {values!r:.80}, expected a list of numbers")
    for position, value in enumerate(values):
        if not isinstance(value, kind):
            what = "an integer" if kind is Integral else "a number"
            raise hook.broke(f"{place}: {name} is {value!r:.80} at {position} of {len(values)}, not {what}")
    return values


def _raw_reward(hook: UserFunction, value: Any, place: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise hook.broke(f"{place}: raw_reward is {value!r:.80}, which is no finite number")
    return float(value)


def _flag(hook: UserFunction, value: Any, place: str) -> bool:
    if value not in (0, 1):
        raise hook.broke(f"{place}: truncated is {value!r:.80}, expected 0 or 1")
    return bool(value)


def _check_teacher(hook: UserFunction, rows: Sequence[ConvertedRow], args: Any) -> None:
    if not getattr(args, "use_opd", False):
        return
    for row in rows:
        if row.sample.teacher_log_probs is None and any(row.sample.loss_mask or ()):
            raise hook.broke(
                f"sample {row.sample.index}: teacher_log_probs is missing for a response of "
                f"{row.sample.response_length} tokens (--use-opd)",
                "add teacher_log_probs to the dict: sample.teacher_log_probs",
            )


def _check_groups(hook: UserFunction, rows: Sequence[ConvertedRow]) -> None:
    first: dict[int | None, Sample] = {}
    for row in rows:
        known = first.setdefault(row.sample.rollout_id, row.sample)
        if known.group_index != row.sample.group_index:
            raise hook.broke(
                f"rollout {row.sample.rollout_id} is in group {known.group_index} (sample {known.index}) and "
                f"in group {row.sample.group_index} (sample {row.sample.index})",
                "give all rows of a rollout its sample.rollout_id and sample.group_index",
            )


def _check_mask_sums(hook: UserFunction, rows: Sequence[ConvertedRow], sums: Sequence[Any] | None) -> None:
    """A sum that is not that of the masks would be another denominator (law 3)."""
    if sums is None:
        return
    tokens: dict[int | None, int] = defaultdict(int)
    for row in rows:
        tokens[row.sample.rollout_id] += sum(row.sample.loss_mask or ())
    for row, given in zip(rows, sums, strict=True):
        rollout = row.sample.rollout_id
        if given != tokens[rollout]:
            raise hook.broke(
                f"sample {row.sample.index}: rollout_mask_sums is {given!r:.80}, the loss_masks of the rows "
                f"of rollout {rollout} sum to {tokens[rollout]}",
                "sum the masks of all rows with this rollout_ids entry, or leave rollout_mask_sums out",
            )


def _check_nothing_lost(hook: UserFunction, rows: Sequence[ConvertedRow], samples: Sequence[Sample]) -> None:
    seen = {source.rollout_id for row in rows for source in row.sources}
    lost = sorted({s.rollout_id for s in samples if s.rollout_id is not None} - seen)
    if lost:
        raise hook.broke(
            f"no row for {len(lost)} of {len(seen) + len(lost)} rollouts: {', '.join(map(str, lost[:5]))}",
            "give each a row, with a mask of zeros if it is not to train; or set remove_sample in "
            "--rollout-sample-filter-path",
        )


_KEYS = f"give {', '.join(REQUIRED)}; and any of {', '.join(OPTIONAL)}"
