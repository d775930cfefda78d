"""`Dataset`: the prompts of a file as Samples, checked, rendered and measured once at load.

Invariant: every row is a sample or is counted in `report` by reason and place; a data set is never empty.
Knows the tokenizer only by `apply_chat_template`, `chat_template` and its call.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

from slime.errors import DataError
from slime.utils.data_files import Row, count_rows, read_file, read_rows
from slime.utils.data_report import DatasetReport
from slime.utils.types import Sample

__all__ = ["Dataset", "DatasetReport", "count_rows", "read_file"]

logger = logging.getLogger(__name__)
_TOKENIZE_BATCH = 1024


class _BadRowError(Exception):
    """A row that cannot be used: reason, and details of this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class Dataset:
    """Samples of a prompt file.

    Args:
        path: as for `read_file`.
        tokenizer: needed to render a template or to measure lengths; may be None otherwise.
        processor: kept for hooks; not used here.
        max_length: most tokens of a prompt; longer ones are left out and counted. Prompts that stay messages
            are not measured: whoever renders them knows their length.
        prompt_key: row key of the prompt, a text or a list of messages.
        label_key, tool_key, metadata_key: row keys. Tools (a list or its JSON) go to ``metadata["tools"]``.
        seed: of `shuffle`.
        apply_chat_template: render prompts to text; a text becomes a user message first.
        apply_chat_template_kwargs: for the template.

    Raises:
        DataError: the file cannot be read, no row can be used, or there is no chat template.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "input",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if multimodal_keys:
            raise DataError("image, video and audio prompts are not supported", place="--multimodal-keys")
        self.path = str(path)
        self.processor = processor
        self.report = DatasetReport(self.path)
        self._tokenizer = tokenizer
        self._keys = {"prompt": prompt_key, "label": label_key, "tool": tool_key, "metadata": metadata_key}
        self._seed = seed
        self._template_kwargs = dict(apply_chat_template_kwargs or {}) if apply_chat_template else None
        if apply_chat_template:
            self._check_template()
        placed = self._drop_long(self._read(), max_length)
        if self.report.counts:
            logger.warning(self.report.summary())
        self._original = [sample for _, sample in placed]
        self._rows = [int(place.rpartition(":")[2]) for place, _ in placed]
        self._order = list(range(len(placed)))
        self.samples = list(self._original)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def shuffle(self, epoch: int) -> None:
        """Order the samples by the permutation of that epoch (of the original order; depends on the seed)."""
        order = list(range(len(self._original)))
        random.Random(self._seed + epoch).shuffle(order)
        self._order = order
        self.samples = [self._original[position] for position in order]

    def row(self, index: int) -> int:
        """The line (or Parquet row, from 1) of the sample at `index`, whatever the order or slice."""
        return self._rows[self._order[index]]

    def _check_template(self) -> None:
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", True):
            raise DataError(
                "the tokenizer has no chat template",
                place="--apply-chat-template",
                remedy="use an instruction-tuned model, put chat_template.jinja into the model folder, "
                "or leave the flag out and store rendered prompts",
            )

    def _read(self) -> list[tuple[str, Sample]]:
        placed, keys_of_first = [], None
        for place, row in read_rows(self.path, self.report):
            keys_of_first = keys_of_first or sorted(row)
            try:
                placed.append((place, self._sample(row)))
            except _BadRowError as bad:
                self.report.add(bad.reason, place, bad.detail)
        if not placed:
            raise self._nothing_usable(keys_of_first)
        return placed

    def _nothing_usable(self, keys_of_first: list[str] | None) -> DataError:
        if self.report.rows == 0:
            return DataError("the data set is empty", place=self.path, remedy="check file and slice")
        found = f"; the first row has the keys {', '.join(keys_of_first)}" if keys_of_first else ""
        return DataError(
            f"no usable row{found}\n{self.report.summary()}",
            place=self.path,
            remedy="set --input-key (and --label-key) to keys of the rows "
            "(--eval-input-key, --eval-label-key in evaluation)",
        )

    def _sample(self, row: Row) -> Sample:
        metadata = self._metadata(row)
        tools = self._tools(row)
        if tools is not None:
            metadata["tools"] = tools
        prompt = self._prompt(row)
        if self._template_kwargs is not None:
            prompt = self._rendered(prompt, tools, self._template_kwargs)
        return Sample(prompt=prompt, label=self._label(row), metadata=metadata)

    def _prompt(self, row: Row) -> str | list[dict[str, Any]]:
        key = self._keys["prompt"]
        if key not in row:
            raise _BadRowError(f"no key {key!r} (--input-key)", f"keys: {', '.join(sorted(row))}")
        prompt = row[key]
        if isinstance(prompt, str) and prompt:
            return prompt
        if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
            return prompt
        if not prompt:
            raise _BadRowError("empty prompt")
        raise _BadRowError("prompt is neither a text nor a list of messages", type(prompt).__name__)

    def _label(self, row: Row) -> Any:
        key = self._keys["label"]
        if key is None:
            return None
        if key not in row:
            raise _BadRowError(f"no key {key!r} (--label-key)", f"keys: {', '.join(sorted(row))}")
        return row[key]

    def _metadata(self, row: Row) -> dict[str, Any]:
        metadata = row.get(self._keys["metadata"] or "")
        if metadata is None:
            return {}
        if not isinstance(metadata, dict):
            raise _BadRowError("metadata is not an object (--metadata-key)", type(metadata).__name__)
        return dict(metadata)

    def _tools(self, row: Row) -> list[Any] | None:
        tools = row.get(self._keys["tool"] or "")
        if tools is None:
            return None
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError as error:
            raise _BadRowError("tools are not JSON (--tool-key)", str(error)) from error
        if not isinstance(tools, list):
            raise _BadRowError("tools are not a list (--tool-key)", type(tools).__name__)
        return tools

    def _rendered(self, prompt: str | list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]) -> str:
        import jinja2

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, **{"tokenize": False, "add_generation_prompt": True} | kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise _BadRowError("the chat template refuses the messages", str(error)) from error
        return text

    def _drop_long(
        self, placed: list[tuple[str, Sample]], max_length: int | None
    ) -> list[tuple[str, Sample]]:
        if max_length is None:
            return placed
        kept, shortest = [], None
        for (place, sample), length in zip(placed, self._lengths(placed), strict=True):
            if length is None or length <= max_length:
                kept.append((place, sample))
            else:
                shortest = length if shortest is None else min(shortest, length)
                self.report.add(f"prompt over {max_length} tokens", place, f"{length} tokens")
        if not kept:
            raise DataError(
                f"all {len(placed)} prompts are over {max_length} tokens; the shortest has {shortest}",
                place=self.path,
                remedy="raise --rollout-max-prompt-len (or --rollout-max-context-len)",
            )
        return kept

    def _lengths(self, placed: list[tuple[str, Sample]]) -> list[int | None]:
        """Tokens of each text prompt; None for messages."""
        texts = [(n, sample.prompt) for n, (_, sample) in enumerate(placed) if isinstance(sample.prompt, str)]
        lengths: list[int | None] = [None] * len(placed)
        for start in range(0, len(texts), _TOKENIZE_BATCH):
            batch = texts[start : start + _TOKENIZE_BATCH]
            ids = self._tokenizer([text for _, text in batch], add_special_tokens=False)["input_ids"]
            for (position, _), tokens in zip(batch, ids, strict=True):
                lengths[position] = len(tokens)
        return lengths


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
