"""`Sample`: the one data currency between rollout and training.

Invariant: `loss_mask`, `rollout_log_probs` and the top-p spans always have one entry for each of the
`response_length` tokens behind the prompt; only sampled tokens carry mask 1, and only they carry a log-prob.
Torch-free: it travels between processes, to disk and through user code.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from slime.utils.generation import version_spans
from slime.utils.routes import decoded_routes, joined_routes, route_rows, shape_of_folder


class SampleStatus(enum.Enum):
    """How the generation of a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SpecInfo:
    """Counters of speculative decoding, summed over the calls of a sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add one engine answer's counters, under the names of SGLang 0.5.15 and later, or the older ones.

        An answer without a verification has none of them, and is not counted.
        """
        if not meta_info.get("spec_verify_ct"):
            return
        self.spec_accept_token_num += _either(meta_info, "spec_num_correct_drafts", "spec_accept_token_num")
        self.spec_draft_token_num += _either(meta_info, "spec_num_proposed_drafts", "spec_draft_token_num")
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    @classmethod
    def total(cls, parts: Iterable[SpecInfo]) -> SpecInfo:
        """The sum of several."""
        total = cls()
        for part in parts:
            for item in dataclasses.fields(cls):
                setattr(total, item.name, getattr(total, item.name) + getattr(part, item.name))
        return total

    @property
    def spec_accept_rate(self) -> float:
        """Accepted share of the drafted tokens."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Generated tokens per verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo:
    """Prompt tokens that the engine took from its prefix cache, summed over the calls of a sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add one engine answer's counters."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached share of the prompt tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


# Inside Sample the plain names are its public aliases.
_Spec: TypeAlias = SpecInfo
_Prefix: TypeAlias = PrefixCacheInfo
_FINISH_STATUS = {
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
    "stop": SampleStatus.COMPLETED,
}


@dataclass
class Sample:
    """One token row: prompt + response, with mask, log-probs, reward and where it came from.

    `group_index` names the prompt's group, `rollout_id` the execution (siblings share it), `index` the row.
    `tokens` holds prompt and response ids; every per-token list covers the response only.
    `rollout_log_probs` are natural logs under the sampling distribution, 0.0 where the mask is 0.
    `rollout_routed_experts` are the experts that each token but the last went to, [tokens - 1, layers,
    top_k]; flat where the model was not known to who recorded them.
    `multimodal_inputs` holds what the placeholders in `tokens` stand for, in order: ``{"images": [...]}``.
    """

    Status = SampleStatus
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | list[float] | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_offsets: list[int] | None = None
    rollout_routed_experts: np.ndarray[Any, Any] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: _Spec = field(default_factory=_Spec)
    prefix_cache_info: _Prefix = field(default_factory=_Prefix)

    def to_dict(self) -> dict[str, Any]:
        """All attributes as plain values: the status as its string, nested infos as dicts."""
        data = dict(self.__dict__)
        data["status"] = self.status.value
        data["spec_info"] = dataclasses.asdict(self.spec_info)
        data["prefix_cache_info"] = dataclasses.asdict(self.prefix_cache_info)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`; keys that are not fields become attributes."""
        data = dict(data)
        names = {f.name for f in dataclasses.fields(cls)}
        sample = cls(**{key: value for key, value in data.items() if key in names})
        sample.status = SampleStatus(data.get("status", SampleStatus.PENDING))
        if isinstance(sample.spec_info, dict):
            sample.spec_info = SpecInfo(**sample.spec_info)
        if isinstance(sample.prefix_cache_info, dict):
            sample.prefix_cache_info = PrefixCacheInfo(**sample.prefix_cache_info)
        for key in data.keys() - names:
            setattr(sample, key, data[key])
        return sample

    def get_reward_value(self, args: Any) -> float:
        """`reward`, or `reward[args.reward_key]` where a key is set: a number, or one a turn or token."""
        key = getattr(args, "reward_key", None)
        if key is None:
            return self.reward  # type: ignore[return-value]
        if not isinstance(self.reward, dict) or key not in self.reward:
            raise KeyError(f"sample {self.index}: reward {self.reward!r} has no key {key!r} (--reward-key)")
        value: float = self.reward[key]
        return value

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that train."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the response."""
        return len(self.tokens) - self.response_length

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Grow the response by tokens that the policy sampled, or by tokens of a tool or environment.

        Args:
            args: any object; only the attributes that are present are read.
            tokens: ids to append.
            log_probs: one per token for sampled tokens, None for the others (0.0 is stored).
            trainable: True for sampled tokens (mask 1), False for the others (mask 0).
            meta_info: the engine's `meta_info` for this call.
            text: decoded text, appended to `response`.
            update_terminal_info: take status, weight version and counters from `meta_info`.

        Raises:
            ValueError: log-probs missing or superfluous, or a length that does not fit.
        """
        tokens = list(tokens)
        new_log_probs = self._checked_log_probs(tokens, log_probs, trainable)
        meta_info = meta_info or {}
        top_p = _top_p_spans(meta_info, len(tokens)) if trainable else None
        before = self.response_length
        self.loss_mask = self._mask_so_far() + [int(trainable)] * len(tokens)
        self.tokens = self.tokens + tokens
        self.response_length += len(tokens)
        if trainable or self.rollout_log_probs is not None or before == 0:
            self.rollout_log_probs = (self.rollout_log_probs or []) + new_log_probs
        self._append_top_p(top_p, before, len(tokens))
        self._append_routed_experts(args, meta_info)
        if trainable and update_terminal_info:
            self._append_version_spans(meta_info, before, len(tokens))
        if text is not None:
            self.response += text
        if update_terminal_info:
            self._take_terminal_info(args, meta_info)
        self.validate_lengths()

    def validate_lengths(self) -> None:
        """Check every per-token list against `response_length`.

        Raises:
            ValueError: naming the sample, the field and both lengths.
        """
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has length {len(value)}, "
                    f"response_length is {self.response_length}"
                )
        if self.response_length > len(self.tokens):
            raise ValueError(
                f"sample {self.index}: response_length {self.response_length} exceeds "
                f"tokens of length {len(self.tokens)}"
            )
        offsets = self.rollout_top_p_offsets
        if offsets is not None and len(offsets) != self.response_length + 1:
            raise ValueError(
                f"sample {self.index}: rollout_top_p_offsets has length {len(offsets)}, "
                f"response_length + 1 is {self.response_length + 1}"
            )

    def _checked_log_probs(
        self, tokens: list[int], log_probs: Sequence[float] | None, trainable: bool
    ) -> list[float]:
        if not trainable:
            if log_probs is not None:
                raise ValueError("non-trainable response tokens should not pass rollout log probabilities")
            return [0.0] * len(tokens)
        if log_probs is None:
            raise ValueError("trainable response tokens require rollout log probabilities")
        if len(log_probs) != len(tokens):
            raise ValueError(
                f"sample {self.index}: log_probs has length {len(log_probs)}, tokens has length {len(tokens)}"
            )
        if self.response_length and self.rollout_log_probs is None:
            raise ValueError(
                f"sample {self.index}: cannot append log_probs: rollout_log_probs is missing for the "
                f"{self.response_length} response tokens before"
            )
        return list(log_probs)

    def _mask_so_far(self) -> list[int]:
        return self.loss_mask if self.loss_mask is not None else [1] * self.response_length

    def _append_top_p(self, spans: tuple[list[int], list[int]] | None, before: int, count: int) -> None:
        if spans is None and self.rollout_top_p_offsets is None:
            return
        ids = list(self.rollout_top_p_token_ids or [])
        offsets = list(self.rollout_top_p_offsets or [0] * (before + 1))
        new_ids, new_offsets = spans or ([], [0] * (count + 1))
        base = len(ids)
        self.rollout_top_p_token_ids = ids + new_ids
        self.rollout_top_p_offsets = offsets + [base + offset for offset in new_offsets[1:]]

    def _append_version_spans(self, meta_info: dict[str, Any], before: int, count: int) -> None:
        """`metadata["weight_version_spans"]`: (version, start, end) of sampled tokens within the response."""
        spans = [
            (span.version, before + span.start, before + span.end)
            for span in version_spans(meta_info, count)
            if span.end > span.start
        ]
        if spans:
            held = self.metadata.get("weight_version_spans", [])
            self.metadata = {**self.metadata, "weight_version_spans": [*held, *spans]}

    def _append_routed_experts(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Routes from token ``routed_experts_start_len`` on; in the model's shape where `args` names it."""
        routed = meta_info.get("routed_experts")
        if routed is None:
            return
        start = int(meta_info.get("routed_experts_start_len", 0))
        routes = joined_routes(
            self.rollout_routed_experts, decoded_routes(routed), start=start, tokens=len(self.tokens)
        )
        shape = shape_of_folder(getattr(args, "hf_checkpoint", None))
        self.rollout_routed_experts = routes if shape is None else route_rows(routes, len(self.tokens), shape)

    def _take_terminal_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        reason = meta_info.get("finish_reason")
        if not reason:
            return
        kind = reason["type"] if isinstance(reason, dict) else reason
        self.status = _FINISH_STATUS.get(kind, self.status)
        if "weight_version" in meta_info:
            self.weight_versions = [*self.weight_versions, meta_info["weight_version"]]
        self.prefix_cache_info.add(meta_info)
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)


def _either(meta_info: dict[str, Any], name: str, older: str) -> int:
    value = meta_info.get(name)
    return int(meta_info.get(older) or 0) if value is None else int(value)


def _top_p_spans(meta_info: dict[str, Any], count: int) -> tuple[list[int], list[int]] | None:
    """Nucleus ids and offsets (length count + 1) of an engine answer, checked."""
    ids, offsets = meta_info.get("top_p_token_ids"), meta_info.get("top_p_offsets")
    if ids is None or offsets is None:
        return None
    ids, offsets = list(ids), list(offsets)
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise ValueError(
            f"top_p offsets must start at 0, have length {count + 1} and end at {len(ids)}; "
            f"got length {len(offsets)}, first {offsets[:1]}, last {offsets[-1:]}"
        )
    return ids, offsets
