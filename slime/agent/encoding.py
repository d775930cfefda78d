"""Text to token ids: special tokens in foreign text stay text, long repeated pieces are encoded once.

Invariant: the ids are those of encoding the whole text at once, but for control tokens that came from
messages: these are spelled out in ordinary tokens and decode to the same text. Safe to use from several
threads. Knows neither messages' meaning nor templates.
"""

from __future__ import annotations

import inspect
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import ModelError

LONG_PIECE = 2048
CACHE_BYTES = 64 << 20
_PRIVATE_USE = range(0xE000, 0xF900)
_SAMPLES = ("word", " lead", "\n\nx = 1", "trail \n", "\n", "  ", "日本語 é", "12345", "{'a': 1}</b>", "")


@dataclass(frozen=True)
class AddedToken:
    """A token that the tokenizer splits off before anything else; `is_clean`: nothing around it matters."""

    text: str
    id: int
    is_special: bool
    is_clean: bool


def added_tokens(tokenizer: Any) -> list[AddedToken]:
    """All added tokens of a tokenizer of transformers; none where it does not list them."""
    listed: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return [
        AddedToken(
            token.content,
            index,
            bool(token.special),
            not (token.lstrip or token.rstrip or token.single_word or token.normalized),
        )
        for index, token in listed.items()
    ]


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """How the tokenizer encodes text without adding tokens of its own.

    None where it cannot, or does not list its added tokens: foreign text could then form any of them.
    """
    if not hasattr(tokenizer, "added_tokens_decoder"):
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and fast.truncation is None and fast.padding is None:
        return lambda text: list(fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    if _takes_plain(getattr(tokenizer, "encode", None)):
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    if _takes_plain(tokenizer):
        return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return None


def _takes_plain(encode: Any) -> bool:
    if not callable(encode):
        return False
    parameters = inspect.signature(encode).parameters.values()
    return any(p.name == "add_special_tokens" or p.kind is p.VAR_KEYWORD for p in parameters)


class TextEncoder:
    """Encodes rendered prompts.

    Args:
        tokenizer: for which `text_encoder` knows how to encode, with `decode`.
        is_marker: whether a non-special added token (`<tool_call>`, `</think>`) controls the conversation.
        cache_bytes: bound of the memory of cached pieces.

    Attributes:
        cuts: encoding piece by piece at added tokens equals encoding the whole, so long pieces are cached.
        control: texts of the tokens that foreign text must not form.

    Raises:
        ModelError: the tokenizer cannot encode, or forms a control token from its parts.
    """

    def __init__(
        self, tokenizer: Any, is_marker: Callable[[str], bool], *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        encode = text_encoder(tokenizer)
        if encode is None:
            raise ModelError(
                "the tokenizer has no `encode(text, add_special_tokens=False)` or lists no added tokens",
                place="tokenizer",
                remedy="give a tokenizer of transformers",
            )
        self._encode = encode
        self._decode = tokenizer.decode
        tokens = added_tokens(tokenizer)
        controls = [t for t in tokens if len(t.text) > 1 and (t.is_special or is_marker(t.text))]
        self.control = tuple(t.text for t in controls)
        self._any_control = re.compile(_any_of(self.control))
        self._control_start = re.compile(f"(?={_any_of(self.control)})[\\s\\S]")
        self.special = re.compile(_any_of([t.text for t in tokens if t.is_special]))
        self._cut = re.compile(_any_of([t.text for t in tokens if t.is_clean]))
        self.cuts = self._pieces_are_exact([t for t in tokens if t.is_clean])
        self._newline = self._encode("\n")
        self._stands_alone = self._decodes_to("x<|y z", self._encode("x<") + self._encode("|y z"))
        self._cache = PieceCache(cache_bytes)
        self._check_neutral(controls)

    def protect(self, value: Any) -> tuple[Any, str | None]:
        """A copy of nested lists, dicts and strings in which no control token is whole, and the mark in it.

        The mark is a character that stands in each control token behind its first character; None, and
        `value` itself, where there is no control token.
        """
        text = "\0".join(_strings(value))
        if not self._any_control.search(text):
            return value, None
        mark = next(c for c in map(chr, _PRIVATE_USE) if c not in text and _escaped(c) not in text)
        return self._marked(value, mark), mark

    def encode(self, text: str, mark: str | None = None) -> list[int]:
        """Ids of a rendered text; `mark` is what `protect` returned for what was rendered."""
        if mark is None:
            return self._whole(text)
        # Templates that print a dict, or JSON in ASCII, write the mark as an escape sequence.
        first, *rest = text.replace(_escaped(mark), mark).split(mark)
        ids = self._whole(first)
        for piece in rest:
            ids += self._tail(piece)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._decode(ids))

    def _whole(self, text: str) -> list[int]:
        if len(text) < LONG_PIECE or not self.cuts:
            return self._encode(text) if text else []
        ids: list[int] = []
        done = last = 0
        for start, end in self._boundaries(text):
            if start - last >= LONG_PIECE:
                if last > done:
                    ids += self._encode(text[done:last])
                ids += self._cached(text[last:start])
                done = start
            last = end
        return ids + self._encode(text[done:]) if done < len(text) else ids

    def _boundaries(self, text: str) -> Iterator[tuple[int, int]]:
        yield from (match.span() for match in self._cut.finditer(text))
        yield len(text), len(text)

    def _cached(self, piece: str) -> list[int]:
        ids = self._cache.get(piece)
        if ids is None:
            ids = array("i", self._encode(piece))
            self._cache.put(piece, ids)
        return ids.tolist()

    def _tail(self, piece: str) -> list[int]:
        """Ids of text from within a text. Some tokenizers put a space before what they take for a start."""
        if self._stands_alone:
            return self._whole(piece)
        ids = self._encode("\n" + piece)
        return (
            ids[len(self._newline) :] if ids[: len(self._newline)] == self._newline else self._encode(piece)
        )

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._control_start.sub(lambda match: match.group() + mark, value)
        if isinstance(value, Mapping):
            return {self._marked(k, mark): self._marked(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, mark) for item in value]
        return value

    def _pieces_are_exact(self, clean: list[AddedToken]) -> bool:
        if not clean:
            return False
        token = next((t for t in clean if t.is_special), clean[0])
        whole = self._encode(token.text.join(("", *_SAMPLES)))
        parts = [i for sample in _SAMPLES for i in (token.id, *self._encode(sample))]
        return whole == parts

    def _decodes_to(self, text: str, ids: list[int]) -> bool:
        return self.decode(ids) == text

    def _check_neutral(self, controls: Iterable[AddedToken]) -> None:
        for token in controls:
            ids = self._encode(token.text[0]) + self._tail(token.text[1:])
            if token.id in ids:
                raise ModelError(
                    f"the tokenizer forms the special token {token.text!r} from its parts, so text of users "
                    "and tools could forge it",
                    place="tokenizer",
                    remedy="remove the token from the tokenizer's merges, or use another tokenizer",
                )


class PieceCache:
    """Ids by text, the least recently used dropped above `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._held: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes held, about."""
        return self._size

    def get(self, text: str) -> array[int] | None:
        """The ids of a text that is held."""
        with self._lock:
            ids = self._held.get(text)
            if ids is not None:
                self._held.move_to_end(text)
            return ids

    def put(self, text: str, ids: array[int]) -> None:
        """Hold the ids of a text."""
        with self._lock:
            if text in self._held:
                return
            self._held[text] = ids
            self._size += _bytes(text, ids)
            while self._size > self._limit and self._held:
                self._size -= _bytes(*self._held.popitem(last=False))


def _bytes(text: str, ids: array[int]) -> int:
    return len(text) + ids.itemsize * len(ids)


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of some texts, factored by their common beginnings: hundreds stay fast."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(trie) if trie else r"(?!)"


def _pattern(node: dict[str, Any]) -> str:
    ways = [re.escape(character) + _pattern(rest) for character, rest in node.items() if character]
    if not ways:
        return ""
    joined = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
    return joined + "?" if "" in node else joined
