"""One step: forward, sample, score, hand out; and every way in which a request ends.

Invariant: an error in a step ends the live requests with status 500 and nothing else; each token is recorded
with the weight version that it was sampled under. Knows nothing of threads or pausing.
"""

from __future__ import annotations

import logging
import math
import time

import torch
from torch import Tensor

from slime.serving.embedded.model_runner import ModelRunner
from slime.serving.embedded.sampler import Sampled, Sampler, top_logprobs
from slime.serving.embedded.scheduler import Plan, Scheduler
from slime.serving.embedded.sequence import FinishReason, Sequence, abort_reason

logger = logging.getLogger(__name__)


class Stepper:
    """Runs the scheduler's plans on the model."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.weight_version = "default"
        self.busy_seconds = 0.0
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = Sampler([])
        self._batch: list[Sequence] = []

    def step(self) -> None:
        """One forward and its consequences; an error fails the live requests."""
        started = time.perf_counter()
        try:
            plan = self._scheduler.plan()
            logits = self._forward(plan)
            sampled = self._sample(plan, logits)
            self._score(plan, logits)
            self._scheduler.advance(plan)
            self._commit(plan, sampled)
        except Exception as error:
            logger.exception("a step failed")
            self._fail(list(self._scheduler.live.values()), f"{type(error).__name__}: {error}")
        self.busy_seconds += time.perf_counter() - started

    def set_version(self, version: str, *, flush: bool) -> None:
        """Name the weights that the model holds now; `flush` forgets what older ones computed."""
        self.weight_version = version
        if flush:
            self._scheduler.flush()

    def abort(self, rid: str) -> None:
        """End a request with what it has; an unknown name is fine."""
        sequence = self._scheduler.find(rid)
        if sequence is not None:
            self._end(sequence, abort_reason())

    def abort_all(self) -> None:
        """End all requests, live and waiting."""
        for sequence in [*self._scheduler.live.values(), *self._scheduler.waiting]:
            self._end(sequence, abort_reason())

    def _forward(self, plan: Plan) -> Tensor:
        """Logits of the plan; and routes go to the requests that want them."""
        inputs = plan.batch, plan.ids, plan.positions, plan.keep
        wanted = self._runner.has_experts and any(s.wants_routes for s in self._scheduler.live.values())
        if not wanted:
            return self._runner.forward(*inputs)
        logits, routes = self._runner.forward_with_routes(*inputs)
        for sequence, rows in plan.split(routes):
            sequence.add_routes(rows)
        return logits

    def _sample(self, plan: Plan, logits: Tensor) -> Sampled:
        if plan.sampled != self._batch:
            self._batch = plan.sampled
            self._sampler = Sampler([sequence.sampler_row for sequence in plan.sampled])
        return self._sampler.sample(logits[: len(plan.sampled)])

    def _score(self, plan: Plan, logits: Tensor) -> None:
        """Log-probs of prompt tokens (temperature 1)."""
        row = len(plan.sampled)
        for sequence, count in plan.scored:
            rows = logits[row : row + count]
            row += count
            assert sequence.score_start is not None
            first = sequence.score_start + 1
            ids = torch.tensor(sequence.tokens[first : first + count])
            shift = rows.logsumexp(-1)
            logprobs = rows.gather(1, ids[:, None])[:, 0] - shift
            wanted = sequence.request.top_logprobs_num
            top = [top_logprobs(rows[i], shift[i].item(), wanted) for i in range(count if wanted else 0)]
            sequence.add_scores(logprobs.tolist(), top)

    def _commit(self, plan: Plan, sampled: Sampled) -> None:
        """Give each request its token; the KV of all of them is recorded already."""
        broken = []
        for sequence, token, logprob, top in zip(
            plan.sampled, sampled.tokens, sampled.logprobs, sampled.top_logprobs, strict=True
        ):
            if not math.isfinite(logprob):
                broken.append(sequence)
                continue
            sequence.append(token, logprob, top, self.weight_version)
            self._scheduler.settle(sequence)
            sequence.notify(self.weight_version)
        for sequence, _ in plan.spans:
            if sequence.max_new_tokens == 0 and sequence.computed == len(sequence.tokens):
                self._end(sequence, {"type": "length", "length": 0})
        self._fail(broken, "the model gave logits that are not finite")

    def _fail(self, sequences: list[Sequence], message: str) -> None:
        self._scheduler.discard(sequences)
        for sequence in sequences:
            sequence.finish(abort_reason(message, 500))
            sequence.notify(self.weight_version)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        self._scheduler.drop(sequence)
        sequence.notify(self.weight_version)
