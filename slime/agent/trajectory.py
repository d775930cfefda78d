"""`TrajectoryManager`: the turns of agent sessions, and the training samples that come of them.

Invariant: every sampled token of a session is trained in exactly one sample or counted under a reason. Knows
messages and token ids; nothing of protocols, templates or engines.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.linearise import Lineariser, Row, Tally, truncate
from slime.agent.messages import TOOLS_ROLE, Message
from slime.agent.tree import MessageTree, Node, Place
from slime.agent.turn import Turn, TurnRecord, keep
from slime.utils.routes import Routes, decoded_routes
from slime.utils.types import Sample, SampleStatus

__all__ = ["TrajectoryManager", "TurnRecord"]

logger = logging.getLogger(__name__)
FORK_THRESHOLD_TOKENS = 1024


class TrajectoryManager:
    """Collects turns by session and gives them out as samples.

    Args:
        fork_threshold_tokens: most sampled tokens that may be masked where a client rewrote the newest
            answer, to go on in the same row; 0 never masks one, and begins another row instead.
        keep_side: train side requests (titles, probes) too.
        keep_abandoned: train answers that the client did not take too.

    Attributes:
        totals: counts of all sessions that were given out.
    """

    def __init__(
        self,
        *,
        fork_threshold_tokens: int = FORK_THRESHOLD_TOKENS,
        keep_side: bool = False,
        keep_abandoned: bool = False,
    ) -> None:
        self.totals = Tally()
        self._fork_threshold = fork_threshold_tokens
        self._keep_side = keep_side
        self._keep_abandoned = keep_abandoned
        self._trees: dict[str, MessageTree] = {}

    def place(self, sid: str, messages: Sequence[Message], *, continues: str | None = None) -> Place | None:
        """Where a history stands in the session's tree; see `MessageTree.place`."""
        tree = self._trees.setdefault(sid, MessageTree(merges=self._fork_threshold > 0))
        return tree.place(messages, continues=continues)

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Message],
        response_message: Message,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Record one model call. An empty prompt has no effect but a warning.

        Args:
            prompt_messages: the history as the client sent it, see `slime.agent.messages`.
            response_message: the assistant message that the client got.
            metadata: may name the turn's ``origin`` and ``agent``.

        Raises:
            ValueError: the log-probs are not one a sampled token.
        """
        if not prompt_messages or not len(turn.prompt_ids):
            logger.warning("session %s: a turn without a prompt is not recorded", sid)
            return
        place = self.place(sid, prompt_messages)
        assert place is not None
        for name in ("origin", "agent"):
            if metadata and name in metadata:
                setattr(turn, name, metadata[name])
        self.record_at(sid, place, turn=turn, response_message=response_message)

    def record_at(self, sid: str, place: Place, *, turn: TurnRecord, response_message: Message) -> Turn:
        """Record the answer to a history whose place is known."""
        tree = self._trees[sid]
        kept = keep(
            turn,
            number=len(tree.turns),
            base=_nearest(place.node),
            tools={
                str(call.get("id") or index): str(call["function"]["name"])
                for index, call in enumerate(response_message.get("tool_calls") or ())
            },
        )
        tree.add(place.node, response_message, kept, turn.handles)
        return kept

    def add_handles(self, sid: str, turn: Turn, handles: Sequence[str]) -> None:
        """Further names of a turn, under which its answer was given again."""
        self._trees[sid].name(turn, handles)

    def forget_place(self, sid: str, place: Place) -> None:
        """Take back the messages that were new at a place, before anything follows them."""
        self._trees[sid].forget(place)

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """The session's samples; the session is then forgotten.

        Every sample carries the whole reward: the loss counts a rollout once, by its `rollout_id`.

        Args:
            base_sample: gives ids, prompt, label and metadata.
            max_sample_tokens: rows are cut to so many tokens; 0: no limit.

        Returns:
            Siblings in the order of their leaves; empty if nothing was sampled that trains.
        """
        tree = self._trees.pop(sid, None)
        if tree is None:
            return []
        lineariser = Lineariser(
            tree,
            fork_threshold=self._fork_threshold,
            keep_side=self._keep_side,
            keep_abandoned=self._keep_abandoned,
        )
        whole = lineariser.rows()
        cut = (truncate(row, max_sample_tokens or len(row.tokens), lineariser.tally) for row in whole)
        rows = [row for row in cut if row is not None]
        self.totals.add(lineariser.tally)
        segments = _segments(rows, tree)
        extra = dict(extra_metadata or {}) | {"trajectory": lineariser.tally.as_dict()}
        return [
            _sample(row, base_sample, reward, extra | {"segment": segment})
            for row, segment in zip(rows, segments, strict=True)
        ]

    def has_session(self, sid: str) -> bool:
        """Whether turns or requests of the session are held."""
        return sid in self._trees

    def has_turn(self, sid: str, handle: str) -> bool:
        """Whether a turn of the session has this handle."""
        return sid in self._trees and self._trees[sid].has(handle)

    def turn_count(self, sid: str) -> int:
        """Turns recorded for the session."""
        return len(self._trees[sid].turns) if sid in self._trees else 0

    def drop_session(self, sid: str) -> None:
        """Forget the session's turns."""
        self._trees.pop(sid, None)


def _nearest(node: Node) -> Turn | None:
    """The turn above a prompt that the prompt most probably extends."""
    above: Node | None = node
    while above is not None and above.turn is None:
        above = above.parent
    return None if above is None else above.turn


def _segments(rows: Sequence[Row], tree: MessageTree) -> list[str]:
    """Why each row exists: ``subagent``, ``final`` (the main chain that went on longest), or ``wipe``."""
    nodes = {node.turn: node for node in tree.turns}
    mains = [node for node in tree.turns if _origin(node) == "main"]
    opening = _opening(mains[0]) if mains else ()

    def is_subagent(turn: Turn) -> bool:
        is_unnamed = turn.origin == "main" and not turn.agent
        return turn.origin == "subagent" or (is_unnamed and _opening(nodes[turn]) != opening)

    kinds = ["subagent" if is_subagent(row.fresh[-1]) else "wipe" for row in rows]
    last = [
        row.fresh[-1].number if kind == "wipe" and row.fresh[-1].origin == "main" else -1
        for row, kind in zip(rows, kinds, strict=True)
    ]
    if max(last, default=-1) >= 0:
        kinds[last.index(max(last))] = "final"
    return kinds


def _origin(node: Node) -> str:
    return node.turn.origin if node.turn is not None else ""


def _opening(node: Node) -> tuple[int, ...]:
    """The keys of the system prompt that begins a history: clients that name no agents give each its own."""
    path = (node for node in node.path() if node.role != TOOLS_ROLE)
    return tuple(node.key for node in itertools.takewhile(lambda node: node.role == "system", path))


def _sample(
    row: Row, base: Sample, reward: float | dict[str, Any] | None, extra: Mapping[str, Any]
) -> Sample:
    images = row.images()
    return Sample(
        group_index=base.group_index,
        index=base.index,
        rollout_id=base.index if base.rollout_id is None else base.rollout_id,
        prompt=base.prompt,
        label=base.label,
        session_id=base.session_id,
        tokens=row.tokens.tolist(),
        multimodal_inputs={"images": images} if images else None,
        response_length=len(row.tokens) - row.prompt_length,
        loss_mask=row.loss_mask(),
        rollout_log_probs=row.log_probs(),
        weight_versions=_versions(row),
        reward=copy.deepcopy(reward),
        # Routes are the engine's, of images that it expanded: they fit other positions than the row's.
        rollout_routed_experts=None if images else _routed_experts(row),
        status=_status(row),
        metadata=copy.deepcopy(base.metadata) | row.describe() | copy.deepcopy(dict(extra)),
        prefix_cache_info=Sample.PrefixCacheInfo(
            cached_tokens=sum(turn.cached_tokens for turn in row.fresh),
            total_prompt_tokens=sum(turn.prompt_length for turn in row.fresh),
        ),
        spec_info=Sample.SpecInfo.total(turn.spec_info for turn in row.fresh),
    )


def _status(row: Row) -> SampleStatus:
    if row.is_truncated:
        return Sample.Status.TRUNCATED
    return Sample.Status.ABORTED if row.last.finish_reason == "abort" else Sample.Status.COMPLETED


def _routed_experts(row: Row) -> Routes | None:
    """Routes of all tokens but the last, flat, as the engine gave them with the newest turn."""
    last = (row.uncut or row).last
    if last.routed_experts is None:
        return None
    routes = decoded_routes(last.routed_experts)
    width = len(routes) // max(last.length - 1, 1)
    return routes[: width * (len(row.tokens) - 1)]


def _versions(row: Row) -> list[str]:
    """Weight versions of the trained tokens in their order, runs of one version once."""
    return [version for version, _ in itertools.groupby(span[0] for span in row.version_spans())]
