"""From the tree of a session to token rows: each sampled turn is trained in exactly one of them.

A row grows while the next turn's prompt extends it (clean). Where a prompt departs within the newest output,
the row is cut there if few enough sampled tokens are lost (realigned); else a new row begins (forked).
Invariant: sampled tokens = trained + realigned + side + abandoned + truncated. Knows no messages, no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from slime.agent.tree import MessageTree, Node
from slime.agent.turn import Tokens, Turn, common_length

UNUSED_ENDINGS = ("length", "abort")


@dataclass
class Tally:
    """Counts of one session. Tokens are sampled ones.

    `turns` and `tokens` are all that was sampled; of the tokens `trained` are in a row with mask 1, others
    were lost to a realignment or to `max_sample_tokens`, or left out as side requests or abandoned answers.
    `turns_clean`, `turns_realigned` and `turns_forked` say how the turns that follow others joined them.
    """

    turns: int = 0
    tokens: int = 0
    tokens_trained: int = 0
    tokens_realigned: int = 0
    tokens_truncated: int = 0
    tokens_side: int = 0
    tokens_abandoned: int = 0
    turns_clean: int = 0
    turns_realigned: int = 0
    turns_forked: int = 0
    turns_side: int = 0
    turns_abandoned: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def add(self, other: Tally) -> None:
        """Add the counts of another session."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def unaccounted(self) -> int:
        """Sampled tokens that are neither trained nor counted under a reason; always 0."""
        left_out = self.tokens_realigned + self.tokens_truncated + self.tokens_side + self.tokens_abandoned
        return self.tokens - self.tokens_trained - left_out


@dataclass
class Row:
    """A token row under construction.

    Attributes:
        tokens: everything, beginning with the prompt of the first turn.
        spans: where each turn's output stands, as (turn, start, end); it may be cut at its end.
        fresh: the turns that are trained here, and nowhere else.
        uncut: the row that `truncate` cut to this.
    """

    tokens: Tokens
    prompt_length: int
    spans: list[tuple[Turn, int, int]] = field(default_factory=list)
    fresh: list[Turn] = field(default_factory=list)
    uncut: Row | None = None

    @property
    def last(self) -> Turn:
        """The newest turn."""
        return self.spans[-1][0]

    def images(self) -> list[str]:
        """The URLs of the images whose placeholders are in the row, in order."""
        placed = (self.uncut or self).last.prompt_images()
        return [image.url for image in placed if image.position < len(self.tokens)]

    def loss_mask(self) -> list[int]:
        """1 for each token that is trained here; covers what follows the first prompt."""
        mask = np.zeros(len(self.tokens), np.int8)
        for turn, start, end in self.spans:
            mask[start:end] = turn in self.fresh
        values: list[int] = mask[self.prompt_length :].tolist()
        return values

    def log_probs(self) -> list[float] | None:
        """Log-probs as sampled, 0.0 where the mask is 0; None if those of a trained token are not known."""
        values = np.zeros(len(self.tokens))
        for turn, start, end in self.spans:
            if turn in self.fresh:
                if len(turn.log_probs) < len(turn.output):
                    return None
                values[start:end] = turn.log_probs[: end - start]
        result: list[float] = values[self.prompt_length :].tolist()
        return result

    def trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return sum(end - start for turn, start, end in self.spans if turn in self.fresh)

    @property
    def is_truncated(self) -> bool:
        """Whether the row ends at a limit, of the engine or of `max_sample_tokens`."""
        return self.uncut is not None or self.last.finish_reason == "length"

    def version_spans(self) -> list[tuple[str, int, int]]:
        """Weight version of every trained token, as (version, start, end) within the response."""
        spans = []
        for turn, start, end in self.spans:
            for version, first, last in turn.weight_versions if turn in self.fresh else ():
                if start + first < end:
                    offset = start - self.prompt_length
                    spans.append((version, offset + first, min(offset + last, end - self.prompt_length)))
        return spans

    def describe(self) -> dict[str, Any]:
        """What the row's sample says about it."""
        return {
            "truncated": self.is_truncated,
            "use_tool": any(bool(turn.tools) for turn in self.fresh),
            "ill_formed": any(turn.ill_formed for turn in self.fresh),
            "turns": len(self.fresh),
            "weight_version_spans": self.version_spans(),
        }


class Lineariser:
    """Cuts the tree of one session into rows.

    Args:
        fork_threshold: most sampled tokens that a realignment may lose.
        keep_side: side requests make rows too.
        keep_abandoned: answers that the client did not take make rows too.
    """

    def __init__(
        self, tree: MessageTree, *, fork_threshold: int, keep_side: bool = False, keep_abandoned: bool = False
    ) -> None:
        self.tally = Tally()
        self._tree = tree
        self._fork_threshold = fork_threshold
        self._left_out = {
            node.turn: reason
            for node in tree.turns
            if node.turn is not None
            and (reason := _left_out(node, keep_side=keep_side, keep_abandoned=keep_abandoned))
        }

    def rows(self) -> list[Row]:
        """All rows that train something, in the order of their last turns in the tree."""
        self._count_turns()
        chains = [chain for leaf in self._tree.leaves() if (chain := self._kept(leaf))]
        gone_on_from = {turn for chain in chains for turn in chain[:-1]}
        rows = [row for chain in chains if chain[-1] not in gone_on_from for row in self._chain(chain)]
        self.tally.tokens_trained = sum(row.trained_tokens() for row in rows)
        return [row for row in rows if row.trained_tokens()]

    def _count_turns(self) -> None:
        for node in self._tree.turns:
            assert node.turn is not None
            count, reason = len(node.turn.output), self._left_out.get(node.turn)
            self.tally.turns += 1
            self.tally.tokens += count
            if reason is not None:
                turns, tokens = f"turns_{reason}", f"tokens_{reason}"
                setattr(self.tally, turns, getattr(self.tally, turns) + 1)
                setattr(self.tally, tokens, getattr(self.tally, tokens) + count)

    def _kept(self, leaf: Node) -> list[Turn]:
        """The turns on the way to a leaf, without those that are left out."""
        turns = [node.turn for node in leaf.path() if node.turn is not None]
        return [turn for turn in turns if turn not in self._left_out]

    def _chain(self, turns: Sequence[Turn]) -> Iterator[Row]:
        """The rows of the turns on one path."""
        row: Row | None = None
        for turn in turns:
            joined = row is not None and self._join(row, turn)
            if row is None or not joined:
                if row is not None:
                    yield row
                prompt = turn.prompt()
                row = Row(prompt, len(prompt))
            _append_output(row, turn)
        if row is not None:
            yield row

    def _join(self, row: Row, turn: Turn) -> bool:
        """Extend `row` by the prompt of `turn`, cut where they differ; False if that would lose too much."""
        prompt = turn.prompt()
        common = common_length(row.tokens, prompt, row.last.prompt_images(), turn.prompt_images())
        last, start, end = row.spans[-1]
        lost = end - max(common, start) if last in row.fresh and common < end else 0
        is_clean = common == len(row.tokens)
        can_realign = common >= max(start, row.prompt_length) and lost <= self._fork_threshold
        if not turn.is_trained:
            kind = "clean" if is_clean else "realigned" if can_realign else "forked"
            setattr(self.tally, f"turns_{kind}", getattr(self.tally, f"turns_{kind}") + 1)
        if not (is_clean or can_realign):
            return False
        if lost:
            self.tally.tokens_realigned += lost
            row.spans[-1] = (last, start, common)
        elif common < end:
            row.spans[-1] = (last, start, max(common, start))
        row.tokens = prompt
        return True


def _append_output(row: Row, turn: Turn) -> None:
    start = len(row.tokens)
    row.tokens = np.concatenate([row.tokens, turn.output])
    row.spans.append((turn, start, len(row.tokens)))
    if not turn.is_trained:
        turn.is_trained = True
        row.fresh.append(turn)


def truncate(row: Row, size: int, tally: Tally) -> Row | None:
    """The row's first `size` tokens; None if nothing trained is left."""
    if len(row.tokens) <= size:
        return row
    before = row.trained_tokens()
    spans = [(turn, start, min(end, size)) for turn, start, end in row.spans if start < size]
    kept = {id(turn) for turn, _, _ in spans}
    fresh = [turn for turn in row.fresh if id(turn) in kept]
    cut = Row(row.tokens[:size], min(row.prompt_length, size), spans, fresh, uncut=row)
    lost = before - cut.trained_tokens()
    tally.tokens_truncated += lost
    tally.tokens_trained -= lost
    return cut if cut.trained_tokens() else None


def _left_out(node: Node, *, keep_side: bool, keep_abandoned: bool) -> str | None:
    """Why a turn is not trained: ``side``, ``abandoned``, or None."""
    turn = node.turn
    assert turn is not None and node.parent is not None
    if turn.origin == "side":
        return None if keep_side else "side"
    if keep_abandoned:
        return None
    if node.children:
        # A client may go on from a piece of an answer that broke off before its log-probs were known.
        is_unknown = not turn.delivered and len(turn.log_probs) < len(turn.output)
        return "abandoned" if is_unknown else None
    newer = [
        node for node in node.parent.children if node.turn is not None and node.turn.number > turn.number
    ]
    is_passed_over = any(
        other.children and other.turn is not None and other.turn.agent == turn.agent for other in newer
    )
    is_unused = not turn.delivered or is_passed_over or (newer and turn.finish_reason in UNUSED_ENDINGS)
    return "abandoned" if is_unused else None
