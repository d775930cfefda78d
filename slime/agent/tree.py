"""A session's histories as one tree of messages, with the sampled turns at their places.

A history is matched from the root: an assistant message by a handle that this server minted, any message by
what it says. Invariant: a turn stands at one node; where it re-appears under another prefix, that node says
whose turn it repeats. Keeps digests, never messages. Knows neither templates nor samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.agent.messages import Message, handles_of, match_key
from slime.agent.turn import Turn


class Node:
    """A message in its place.

    Attributes:
        turn: what was sampled here; None for messages that clients wrote.
        repeats: the turn that a client put here although it was sampled elsewhere.
        is_echo: a client repeats a turn of this very path, in pieces; it stands there already.
        is_rewritten: a client goes on from another text than was sampled; `key` is then of that text.
    """

    __slots__ = ("children", "is_echo", "is_rewritten", "key", "parent", "repeats", "role", "turn")

    def __init__(self, parent: Node | None, key: int, role: str) -> None:
        self.parent = parent
        self.key = key
        self.role = role
        self.children: list[Node] = []
        self.is_echo = False
        self.is_rewritten = False
        self.turn: Turn | None = None
        self.repeats: Turn | None = None
        if parent is not None:
            parent.children.append(self)

    @property
    def said(self) -> Turn | None:
        """The turn whose tokens stand here, sampled here or elsewhere."""
        return None if self.is_rewritten else self.turn or self.repeats

    def path(self) -> list[Node]:
        """The nodes from the root, which is not among them, to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Place:
    """Where a history stands in the tree.

    Attributes:
        node: the last message of the history; a request's answer becomes its child.
        turns: for each message of the history the turn that was sampled for it, at this place or elsewhere.
        echoes: for each message whether it only repeats a turn that stands before it.
        anchor: how many messages end with the last turn that was sampled in this very place; 0: none.
        new: how many messages at the end were not known before.
    """

    node: Node
    turns: tuple[Turn | None, ...]
    echoes: tuple[bool, ...]
    anchor: int
    new: int = 0

    @property
    def anchor_turn(self) -> Turn | None:
        """The turn at `anchor`."""
        return self.turns[self.anchor - 1] if self.anchor else None


class MessageTree:
    """The tree of one session.

    Args:
        merges: an only answer that nothing follows is taken to be what a client rewrote, where it is not
            known by handle or text; else what is rewritten is another branch.
    """

    def __init__(self, *, merges: bool) -> None:
        self.root = Node(None, 0, "")
        self.turns: list[Node] = []
        self._merges = merges
        self._by_handle: dict[str, Node] = {}

    def place(self, messages: Sequence[Message], *, continues: str | None = None) -> Place | None:
        """Find a history's place; messages that are new are put there.

        Args:
            continues: a handle of the turn that the messages follow, instead of beginning at the root.

        Returns:
            None if `continues` is not known.
        """
        start = self._by_handle.get(continues) if continues else self.root
        if start is None or start.is_rewritten:
            return None
        node, new = start, 0
        for message in messages:
            child = self._child(node, message)
            new += child is None
            node = child or self._new(node, message)
        path = node.path()
        turns = tuple(node.said for node in path)
        here = [i for i, node in enumerate(path, start=1) if node.turn is not None and not node.is_rewritten]
        return Place(node, turns, tuple(node.is_echo for node in path), here[-1] if here else 0, new)

    def add(self, parent: Node, message: Message, turn: Turn, handles: Sequence[str]) -> Node:
        """Put a sampled turn under the prompt that it answers."""
        node = Node(parent, match_key(message), "assistant")
        node.turn = turn
        self.turns.append(node)
        for handle in (*handles, *handles_of(message)):
            self._by_handle[handle] = node
        return node

    def name(self, turn: Turn, handles: Sequence[str]) -> None:
        """Give a turn further handles."""
        self._by_handle.update(dict.fromkeys(handles, self.turns[turn.number]))

    def has(self, handle: str) -> bool:
        """Whether a turn has this handle."""
        return handle in self._by_handle

    def forget(self, place: Place) -> None:
        """Take back the messages that were new at a place, before anything follows them."""
        node = place.node
        for _ in range(place.new):
            assert node.parent is not None
            node.parent.children.remove(node)
            node = node.parent

    def leaves(self) -> Iterator[Node]:
        """Nodes without children, depth first, in the order in which they came."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack.extend(reversed(node.children))

    def _known(self, message: Message) -> Node | None:
        """The node of the turn that the message repeats, by its handles."""
        nodes = (self._by_handle.get(handle) for handle in handles_of(message))
        return next((node for node in nodes if node is not None), None)

    def _child(self, node: Node, message: Message) -> Node | None:
        if message.get("role") != "assistant":
            return _last(node, match_key(message))
        known = self._known(message)
        if known is not None:
            key = match_key(message)
            here = [
                child
                for child in node.children
                if known.turn in (child.turn, child.repeats) or (child.is_echo and child.key == key)
            ]
            if here and not here[0].children:
                here[0].is_rewritten = False
            return here[0] if here else None
        return _last(node, match_key(message)) or self._rewritten(node, message)

    def _new(self, node: Node, message: Message) -> Node:
        new = Node(node, match_key(message), str(message.get("role")))
        known = self._known(message) if new.role == "assistant" else None
        if known is not None:
            new.is_echo = any(known.turn in (above.turn, above.repeats) for above in node.path())
            new.repeats = None if new.is_echo else known.turn
        return new

    def _rewritten(self, node: Node, message: Message) -> Node | None:
        """The only answer to `node`, if nothing follows it; it then says what the message says."""
        answers = [child for child in node.children if child.role == "assistant"]
        if not self._merges or len(answers) != 1 or answers[0].children or answers[0].turn is None:
            return None
        answers[0].key, answers[0].is_rewritten = match_key(message), True
        return answers[0]


def _last(node: Node, key: int) -> Node | None:
    """The newest child with this key: of two equal answers a client goes on from the one that it got last."""
    return next((child for child in reversed(node.children) if child.key == key), None)
