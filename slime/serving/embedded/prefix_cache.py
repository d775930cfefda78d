"""Keys and values of finished token sequences, found by longest common prefix: a radix tree.

Each node owns the keys and values of its own stretch of tokens only, so that shared prefixes are held once.
Invariant: `tokens` equals the sum over nodes; least recently used leaves go first. A lookup costs the length
of the match, not of the store. Knows nothing of requests or budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class _Node:
    key: list[int]
    memory: Tensor | None
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """Radix tree from token ids to compact memory [layers, 2, kv_heads, n, dim]."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node([], None, None)
        self.tokens = 0
        self._clock = 0

    def match(self, tokens: Sequence[int]) -> list[Tensor]:
        """Memory of the longest stored prefix of `tokens`, in order; views, valid until the next change."""
        return [
            node.memory[:, :, :, :count]
            for node, count in self._walk(list(tokens))
            if node.memory is not None
        ]

    def insert(self, tokens: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Store what is missing of `tokens`; `read(start, stop)` gives a compact copy of those positions."""
        tokens = list(tokens)
        node, done = self._root, 0
        for child, count in list(self._walk(tokens)):
            node = child if count == len(child.key) else self._split(child, count)
            done += count
        if done < len(tokens):
            leaf = _Node(tokens[done:], read(done, len(tokens)), node, used=self._clock)
            node.children[tokens[done]] = leaf
            self.tokens += len(leaf.key)

    def missing(self, tokens: Sequence[int]) -> int:
        """How many tokens `insert` would add."""
        return len(tokens) - sum(count for _, count in self._walk(list(tokens)))

    def evict(self, tokens: int) -> int:
        """Drop least recently used leaves until `tokens` or all are freed; returns tokens freed."""
        freed = 0
        while freed < tokens and self._root.children:
            for leaf in sorted(self._leaves(), key=lambda node: node.used):
                if freed >= tokens:
                    break
                freed += self._drop(leaf)
        return freed

    def _walk(self, tokens: list[int]) -> Iterator[tuple[_Node, int]]:
        """Nodes along the longest match with the number of tokens matched in each; marks them used."""
        self._clock += 1
        node, position = self._root, 0
        while position < len(tokens) and (child := node.children.get(tokens[position])):
            count = _common(child.key, tokens, position)
            child.used = self._clock
            yield child, count
            if count < len(child.key):
                return
            node, position = child, position + count

    def _split(self, node: _Node, count: int) -> _Node:
        """Cut a node in two after `count` tokens; returns the upper part."""
        assert node.memory is not None and node.parent is not None
        front, back = _copy(node.memory[:, :, :, :count]), _copy(node.memory[:, :, :, count:])
        upper = _Node(node.key[:count], front, node.parent, used=node.used)
        node.parent.children[node.key[0]] = upper
        node.key, node.memory, node.parent = node.key[count:], back, upper
        upper.children[node.key[0]] = node
        return upper

    def _leaves(self) -> list[_Node]:
        stack, leaves = list(self._root.children.values()), []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                leaves.append(node)
        return leaves

    def _drop(self, leaf: _Node) -> int:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.key[0]]
        self.tokens -= len(leaf.key)
        return len(leaf.key)


def _copy(memory: Tensor) -> Tensor:
    """A compact copy that keeps nothing else alive."""
    return memory.clone(memory_format=torch.contiguous_format)


def _common(key: list[int], tokens: list[int], position: int) -> int:
    """Length of the common prefix of `key` and `tokens[position:]`."""
    limit = min(len(key), len(tokens) - position)
    if key[:limit] == tokens[position : position + limit]:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if key[low:middle] == tokens[position + low : position + middle]:
            low = middle
        else:
            high = middle
    return low
