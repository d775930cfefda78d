"""One packed row without padding: the prefix forest of a micro-batch laid out as tensors.

Invariant: each distinct prefix is computed once; every requested prediction names the hidden state that makes
    it.
Attention runs in blocks: a block's queries are contiguous, and its keys are whole earlier blocks (the
ancestors) followed by the block itself. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from slime.train.tree import PrefixForest, build_forest
from slime.utils.routes import Routes

# Subtrees up to this size share one masked attention call: the wasted products cost less than further calls.
_BLOCK_TOKENS = 64
# Longer runs behind a prefix are cut, which bounds the mask of a call to this many rows.
_PIECE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """Token row, and the ascending positions (1 or later) whose prediction is asked for.

    Attributes:
        routes: experts of each token but the last, [tokens - 1, layers, top_k], where they are replayed.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    routes: Routes | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``start:stop`` of the packed row; `before` are the blocks of the ancestors, root first."""

    start: int
    stop: int
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which tokens of a packed row of N see which.

    Attributes:
        depth: [N] position ids.
        subtree_end: [N] packed index behind the last token of the block that sees this one.
        routes: [N, layers, top_k] experts to take; None lets the routers choose.
    """

    blocks: tuple[Block, ...]
    depth: torch.Tensor
    subtree_end: torch.Tensor
    routes: torch.Tensor | None = None
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each block."""
        return [block.stop - block.start for block in self.blocks]

    def mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [queries, keys] of a block, kept for the next layer; None is plain causal attention.

        Args:
            window: a token sees itself and the window - 1 tokens before it; None is all of them.
        """
        key = (index, window, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(self.blocks[index], window, dtype)
        return self._masks[key]

    def _build_mask(self, block: Block, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        device = self.depth.device
        own = torch.arange(block.start, block.stop, device=device)
        visible = (own[None, :] <= own[:, None]) & (own[:, None] < self.subtree_end[None, own])
        keys = own
        if block.before:
            earlier = [self.blocks[index] for index in block.before]
            before = torch.cat([torch.arange(b.start, b.stop, device=device) for b in earlier])
            visible = torch.cat([visible.new_ones(len(own), len(before)), visible], dim=1)
            keys = torch.cat([before, own])
        if window is not None:
            visible &= self.depth[own][:, None] - self.depth[keys][None, :] < window
        if not block.before and bool((visible == torch.ones_like(visible).tril()).all()):
            return None
        return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch of R requests, ready for the model.

    Attributes:
        input_ids: [1, N].
        hidden_index: [P] packed positions whose hidden state predicts something, ascending.
        query_position: [Q] index into `hidden_index` of each distinct (position, target) pair, ascending.
        query_target: [Q] token id.
        token_query: [T] query of each requested target, rows after one another.
        row_sizes: requested targets of each row.
    """

    input_ids: torch.Tensor
    plan: AttentionPlan
    hidden_index: torch.Tensor
    query_position: torch.Tensor
    query_target: torch.Tensor
    token_query: torch.Tensor
    row_sizes: tuple[int, ...]

    @property
    def position_ids(self) -> torch.Tensor:
        """[1, N]."""
        return self.plan.depth[None]


def pack_requests(
    requests: Sequence[Request], *, share_prefixes: bool = True, device: torch.device | None = None
) -> PackedBatch:
    """Lay out the forest of the rows; tokens behind a row's last requested prediction are left out."""
    rows, inputs = distinct_inputs(requests)
    forest = build_forest(rows, share=share_prefixes)
    order, blocks = _lay_out(forest)
    starts = np.zeros(len(forest.segments), dtype=np.int64)
    lengths = np.array([len(segment.tokens) for segment in forest.segments], dtype=np.int64)
    starts[order] = np.concatenate([[0], np.cumsum(lengths[order])[:-1]])
    positions, targets = _predictions(requests, forest, starts)
    keys, token_query = np.unique(positions * (targets.max() + 1) + targets, return_inverse=True)
    hidden_index, query_position = np.unique(keys // (targets.max() + 1), return_inverse=True)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

    subtree = np.asarray(forest.subtree_tokens(), dtype=np.int64)
    ends = (starts + subtree)[order]
    segments = [forest.segments[index] for index in order]
    depth = np.concatenate([np.arange(s.start, s.start + len(s.tokens)) for s in segments])
    packed = np.concatenate([np.asarray(s.tokens) for s in segments])
    plan = AttentionPlan(
        blocks=tuple(blocks),
        depth=tensor(depth),
        subtree_end=tensor(np.repeat(ends, lengths[order])),
        routes=None if inputs.routes is None else tensor(inputs.routes[packed]),
    )
    return PackedBatch(
        input_ids=tensor(inputs.tokens[packed] if inputs.tokens is not None else packed)[None],
        plan=plan,
        hidden_index=tensor(hidden_index),
        query_position=tensor(query_position),
        query_target=tensor(keys % (targets.max() + 1)),
        token_query=tensor(token_query),
        row_sizes=tuple(len(request.targets) for request in requests),
    )


def empty_batch(device: torch.device | None = None) -> PackedBatch:
    """One token, of which nothing is asked: a pass in which every tensor has a gradient, and it is zero."""
    batch = pack_requests([Request((0, 0), (1,))], device=device)
    return replace(batch, token_query=batch.token_query[:0], row_sizes=())


def input_tokens(request: Request) -> tuple[int, ...]:
    """The tokens that the model must see for the request."""
    return request.tokens[: request.targets[-1]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the numbers of rows stand for; without routes they are the tokens themselves.

    Attributes:
        tokens: [number] token id.
        routes: [number, layers, top_k].
    """

    tokens: np.ndarray | None = None
    routes: np.ndarray | None = None


def distinct_inputs(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], Inputs]:
    """The rows that the model must see, as numbers of which equal ones stand for equal inputs.

    A token that goes to other experts is another input: prefixes that differ in it alone are not shared. The
    numbers are in the order of the tokens, so that rows are laid out as they would be without routes.
    """
    rows = [input_tokens(request) for request in requests]
    if all(request.routes is None for request in requests):
        return rows, Inputs()
    keys = [_keys(row, request.routes) for row, request in zip(rows, requests, strict=True)]
    known = {key: route for of_row in keys for key, route in of_row}
    order = sorted(known)
    number = {key: index for index, key in enumerate(order)}
    tokens, routes = np.array([token for token, _ in order]), np.stack([known[key] for key in order])
    return [tuple(number[key] for key, _ in of_row) for of_row in keys], Inputs(tokens, routes)


def _keys(row: tuple[int, ...], routes: Routes | None) -> list[tuple[tuple[int, bytes], Routes]]:
    """What tells the inputs of a row apart, and the routes of each; all rows of a batch have some or none."""
    assert routes is not None
    return [((t, r.tobytes()), r) for t, r in zip(row, routes[: len(row)], strict=True)]


def _predictions(
    requests: Sequence[Request], forest: PrefixForest, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Packed position and target id of every requested prediction, rows after one another."""
    positions, targets = [], []
    for request, end in zip(requests, forest.row_ends, strict=True):
        path = [
            np.arange(starts[index], starts[index] + len(forest.segments[index].tokens))
            for index in forest.path(end)
        ]
        wanted = np.asarray(request.targets, dtype=np.int64)
        positions.append(np.concatenate(path)[wanted - 1])
        targets.append(np.asarray(request.tokens, dtype=np.int64)[wanted])
    return np.concatenate(positions), np.concatenate(targets)


def _lay_out(forest: PrefixForest) -> tuple[list[int], list[Block]]:
    """Order of the segments in the packed row, and its attention blocks."""
    children, below = forest.children(), forest.subtree_tokens()
    order: list[int] = []
    blocks: list[Block] = []
    position = 0
    families: list[tuple[list[int], tuple[int, ...]]] = [(children[-1], ())]
    while families:
        siblings, before = families.pop()
        for group in _small_groups(siblings, below):
            size = sum(below[index] for index in group)
            blocks.append(Block(position, position + size, before))
            order.extend(_preorder(group, children))
            position += size
        for index in siblings:
            if below[index] <= _BLOCK_TOKENS:
                continue
            path = before
            for stop in _piece_stops(len(forest.segments[index].tokens), cut=bool(before)):
                blocks.append(Block(blocks[-1].stop if blocks else 0, position + stop, path))
                path = (*path, len(blocks) - 1)
            order.append(index)
            position = blocks[-1].stop
            families.append((children[index], path))
    return order, blocks


def _small_groups(siblings: Sequence[int], below: Sequence[int]) -> Iterator[list[int]]:
    """Neighbouring small subtrees, as many as fit one block."""
    group: list[int] = []
    size = 0
    for index in siblings:
        if below[index] > _BLOCK_TOKENS:
            continue
        if group and size + below[index] > _BLOCK_TOKENS:
            yield group
            group, size = [], 0
        group.append(index)
        size += below[index]
    if group:
        yield group


def _preorder(group: Sequence[int], children: Sequence[Sequence[int]]) -> list[int]:
    found, stack = [], list(reversed(group))
    while stack:
        found.append(stack.pop())
        stack.extend(reversed(children[found[-1]]))
    return found


def _piece_stops(length: int, *, cut: bool) -> list[int]:
    return [*range(_PIECE_TOKENS, length, _PIECE_TOKENS), length] if cut else [length]
