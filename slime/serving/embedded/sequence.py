"""One request in flight: its tokens, log-probs, text, weight-version spans and why it ended.

Invariant: `tokens` is prompt + output; `output_logprobs` has one entry an output token; the spans cover the
output without gaps. Knows nothing of batches, memory or threads.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import numpy as np
from torch import Tensor

from slime.serving.embedded.kv_cache import Place
from slime.serving.embedded.request import Request, TokenLogprob, TopLogprobs, Update
from slime.serving.embedded.sampler import Row
from slime.utils.detokenizer import IncrementalDecoder, StopStrings
from slime.utils.routes import Routes, encoded_routes

FinishReason = dict[str, Any]


def abort_reason(message: str = "Aborted", status_code: int | None = None) -> FinishReason:
    """SGLang's finish reason of a request that did not run to its end."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}


class Sequence:
    """State of a request.

    Attributes:
        order: arrival number; the youngest is retracted first.
        buffer: compact memory while the prompt is computed; `computed` positions of it are valid.
        place: slot while it decodes.
        epoch: cache epoch of its keys and values; None while it holds none.
    """

    def __init__(
        self,
        request: Request,
        listener: Callable[[Update], None],
        tokenizer: Any,
        *,
        order: int,
        seed: int,
        eos_ids: frozenset[int],
        context_length: int,
    ) -> None:
        params = request.params
        self.request = request
        self.order = order
        self.tokens = list(request.input_ids)
        self.prompt_length = len(self.tokens)
        self.max_new_tokens = min(params.max_new_tokens, context_length - self.prompt_length)
        self.output_logprobs: list[float] = []
        self.output_top: list[TopLogprobs] = []
        self.input_logprobs: list[TokenLogprob] = []
        self.input_top: list[TopLogprobs | None] = []
        self.cached_tokens: int | None = None
        self.num_retractions = 0
        self.finish_reason: FinishReason | None = None
        self.buffer: Tensor | None = None
        self.computed = 0
        self.place: Place[Sequence] | None = None
        self.epoch: int | None = None
        self._listener = listener
        self._tokenizer = tokenizer
        self._routes: list[Routes] = []
        self._spans: list[dict[str, Any]] = []
        self._stop_ids = frozenset() if params.ignore_eos else params.stop_token_ids | eos_ids
        self._stops = StopStrings(params.stop)
        self._incremental = bool(params.stop) or (request.stream and request.want_text)
        self._decoder = self._new_decoder()
        self._text = ""
        self.sampler_row = Row(
            params=params,
            seed=seed,
            prompt_length=self.prompt_length,
            tokens=self.tokens,
            stop_ids=tuple(sorted(self._stop_ids)),
            top_logprobs=request.top_logprobs_num if request.return_logprob else 0,
        )

    @property
    def rid(self) -> str:
        """Name of the request."""
        return self.request.rid

    @property
    def output_ids(self) -> list[int]:
        """Sampled tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def held_tokens(self) -> int:
        """Tokens of key-value memory that it takes now, the next one included."""
        buffer = self.buffer
        if buffer is not None:
            return buffer.shape[3] + 1
        return len(self.tokens) if self.place is not None else 0

    @property
    def reusable_length(self) -> int:
        """Positions whose keys and values may be reused; the rest is needed for its logits or routes."""
        if self.wants_routes:
            return 0
        start = self.score_start
        last = len(self.tokens) - 1
        return last if start is None or start >= self.prompt_length - 1 else min(start, last)

    @property
    def score_start(self) -> int | None:
        """Prompt position whose successors' log-probs are still wanted."""
        start = self.request.logprob_start_len
        if not self.request.return_logprob or start < 0:
            return None
        return min(start, self.prompt_length - 1) + max(0, len(self.input_logprobs) - 1)

    def retract(self) -> None:
        """Forget the keys and values; a prompt that was scored in part is scored anew."""
        self.num_retractions += 1
        self.buffer = self.place = self.epoch = None
        self.computed = 0
        self._routes = []
        if self.score_start is not None and self.score_start < self.prompt_length - 1:
            self.input_logprobs, self.input_top = [], []

    @property
    def wants_routes(self) -> bool:
        """Whether the experts of its tokens are told, where there are any."""
        return self.request.return_routed_experts

    def add_routes(self, routes: Routes) -> None:
        """The experts of the next tokens that were computed, [n, layers, top_k]."""
        if self.wants_routes:
            self._routes.append(routes)

    def begin_scores(self) -> None:
        """Enter the first scored prompt token, which has no log-prob."""
        start = self.score_start
        if start is not None and not self.input_logprobs:
            self.input_logprobs.append((None, self.tokens[start]))
            self.input_top.append(None)

    def add_scores(self, logprobs: Tokens[float], top: Tokens[TopLogprobs]) -> None:
        """Log-probs of the next prompt tokens."""
        first = (self.score_start or 0) + 1
        ids = self.tokens[first : first + len(logprobs)]
        self.input_logprobs.extend(zip(logprobs, ids, strict=True))
        self.input_top.extend(top)

    def append(self, token: int, logprob: float, top: TopLogprobs, version: str) -> None:
        """Take a sampled token and see whether it ends the request."""
        self.tokens.append(token)
        self.output_logprobs.append(logprob)
        if self.request.top_logprobs_num:
            self.output_top.append(top)
        if not self._spans or self._spans[-1]["version"] != version:
            self._spans.append({"version": version, "start": self.output_length - 1, "end": 0})
        self._spans[-1]["end"] = self.output_length
        self.finish_reason = self._reason_to_stop(token)

    def finish(self, reason: FinishReason) -> None:
        """End the request for a reason from outside; the first reason stays."""
        self.finish_reason = self.finish_reason or reason

    def notify(self, version: str) -> None:
        """Tell the listener, where it wants to know of this state."""
        if self.finish_reason is not None or self.request.stream:
            self._listener(self._update(version))

    def _reason_to_stop(self, token: int) -> FinishReason | None:
        may_stop = self.output_length >= self.request.params.min_new_tokens
        if may_stop and token in self._stop_ids:
            if self._incremental and self.request.params.no_stop_trim:
                self._text += self._decoder.push([token])
            return {"type": "stop", "matched": token}
        if self._incremental:
            new = self._decoder.push([token])
            self._text += new
            hit = self._stops.find(self._text, len(new)) if may_stop else None
            if hit is not None:
                stop, position = hit
                if not self.request.params.no_stop_trim:
                    self._text = self._text[:position]
                return {"type": "stop", "matched": stop}
        if self.output_length >= self.max_new_tokens:
            return {"type": "length", "length": self.output_length}
        return None

    def _new_decoder(self) -> IncrementalDecoder:
        params = self.request.params
        return IncrementalDecoder(
            self._tokenizer,
            self.request.input_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def _visible_text(self) -> str:
        if not self.request.want_text:
            return ""
        reason = self.finish_reason
        if reason is None:
            return self._text[: self._stops.safe_length(self._text)]
        matched = reason.get("matched")
        if isinstance(matched, str):
            return self._text
        if not self._incremental:
            trim = matched is not None and not self.request.params.no_stop_trim
            ids = self.output_ids
            self._text = self._decoder.push(ids[:-1] if trim else ids)
            self._incremental = True
        return self._text + self._decoder.pending()

    def _update(self, version: str) -> Update:
        request = self.request
        return Update(
            rid=request.rid,
            text=self._visible_text(),
            output_ids=self.output_ids,
            output_logprobs=list(self.output_logprobs) if request.return_logprob else [],
            input_logprobs=list(self.input_logprobs),
            output_top_logprobs=list(self.output_top) if request.return_logprob else [],
            input_top_logprobs=list(self.input_top) if request.top_logprobs_num else [],
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached_tokens or 0,
            weight_version=version,
            weight_versions=[dict(span) for span in self._spans],
            num_retractions=self.num_retractions,
            more_meta=self._told_routes(),
        )

    def _told_routes(self) -> dict[str, Any]:
        """At the end, unless that came before the prompt was computed."""
        count = sum(map(len, self._routes))
        if not count or count < len(self.tokens) - 1 or self.finish_reason is None:
            return {}
        routes = np.concatenate(self._routes)[self.request.routed_experts_start_len :]
        return {"routed_experts": encoded_routes(routes)}
