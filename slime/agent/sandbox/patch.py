"""One file's change as text of a git patch. Pure: bytes in, text out.

A file is text where it is UTF-8 without a zero byte; else it is given as a binary literal.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

_CONTEXT = 3
_FULL_MATCH = 4_000_000  # lines of one side times lines of the other: beyond, one block replaces another
_LITERAL_LINE = 52
_SHORT = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


class Entry(NamedTuple):
    """A file as git sees it: `mode` is 100644, 100755 or 120000 (a link, whose content is its target)."""

    mode: str
    data: bytes


def file_patch(path: str, old: Entry | None, new: Entry | None) -> str:
    """The patch of one path; a change between file and link is a removal and an addition."""
    if old and new and (old.mode == "120000") != (new.mode == "120000"):
        return file_patch(path, old, None) + file_patch(path, None, new)
    head = f"diff --git {quoted('a/' + path)} {quoted('b/' + path)}\n" + _mode_lines(old, new)
    before, after = old.data if old else b"", new.data if new else b""
    if old and new and before == after:
        return head
    both = f"{_object_id(old)}..{_object_id(new)}"
    head += f"index {both}{f' {new.mode}' if old and new and old.mode == new.mode else ''}\n"
    if before == after:
        return head  # an empty file came or went
    texts = _text(before), _text(after)
    if texts[0] is None or texts[1] is None:
        return head + _literal(after)
    names = [quoted(side + path) if entry else "/dev/null" for side, entry in (("a/", old), ("b/", new))]
    tabs = ["\t" if " " in name else "" for name in names]
    return f"{head}--- {names[0]}{tabs[0]}\n+++ {names[1]}{tabs[1]}\n" + "".join(_hunks(texts[0], texts[1]))


def _mode_lines(old: Entry | None, new: Entry | None) -> str:
    if old is None:
        return f"new file mode {new.mode}\n" if new else ""
    if new is None:
        return f"deleted file mode {old.mode}\n"
    return "" if old.mode == new.mode else f"old mode {old.mode}\nnew mode {new.mode}\n"


def quoted(path: str) -> str:
    """A path as git writes it: in C quotes where it has unusual bytes."""
    raw = path.encode(errors="surrogateescape")
    if all(32 <= byte < 127 and byte not in (34, 92) for byte in raw):
        return path
    parts = [_SHORT.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in raw]
    return f'"{"".join(parts)}"'


def _object_id(entry: Entry | None) -> str:
    if entry is None:
        return "0" * 40
    return hashlib.sha1(b"blob %d\0" % len(entry.data) + entry.data, usedforsecurity=False).hexdigest()


def _text(data: bytes) -> str | None:
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _literal(data: bytes) -> str:
    packed = zlib.compress(data)
    lines = [f"GIT binary patch\nliteral {len(data)}\n"]
    for start in range(0, len(packed), _LITERAL_LINE):
        chunk = packed[start : start + _LITERAL_LINE]
        length = chr(ord("A") + len(chunk) - 1) if len(chunk) <= 26 else chr(ord("a") + len(chunk) - 27)
        lines.append(f"{length}{base64.b85encode(chunk, pad=True).decode()}\n")
    return "".join(lines) + "\n"


def _lines(text: str) -> list[str]:
    *full, rest = text.split("\n")
    return [f"{line}\n" for line in full] + ([rest] if rest else [])


def _hunks(old: str, new: str) -> Iterator[str]:
    before, after = _lines(old), _lines(new)
    for group in _groups(before, after):
        first, last = group[0], group[-1]
        yield f"@@ -{_span(first[1], last[2])} +{_span(first[3], last[4])} @@\n"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (_line(" ", line) for line in before[i1:i2])
            else:
                yield from (_line("-", line) for line in before[i1:i2])
                yield from (_line("+", line) for line in after[j1:j2])


def _span(start: int, stop: int) -> str:
    length = stop - start
    return f"{start if length == 0 else start + 1},{length}"


def _line(mark: str, line: str) -> str:
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"


def _groups(before: list[str], after: list[str]) -> Iterator[list[tuple[str, int, int, int, int]]]:
    """Groups of operations with context; the common beginning and end are not searched."""
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    if len(old) * len(new) <= _FULL_MATCH:
        middle = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    else:
        middle = [("replace", 0, len(old), 0, len(new))]
    codes = [("equal", 0, start, 0, start)] if start else []
    codes += [(tag, i1 + start, i2 + start, j1 + start, j2 + start) for tag, i1, i2, j1, j2 in middle]
    if end:
        codes.append(("equal", len(before) - end, len(before), len(after) - end, len(after)))
    return _grouped(codes)


def _common(one: list[str], other: list[str]) -> int:
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    return same


Code = tuple[str, int, int, int, int]


def _grouped(codes: list[Code]) -> Iterator[list[Code]]:
    """Cut equal stretches down to context; a long one between two changes ends a group."""
    group: list[Code] = []
    for index, (tag, i1, i2, j1, j2) in enumerate(codes):
        if tag != "equal":
            group.append((tag, i1, i2, j1, j2))
            continue
        if index == 0:
            skip = max(0, i2 - i1 - _CONTEXT)
            group.append((tag, i1 + skip, i2, j1 + skip, j2))
        elif index == len(codes) - 1:
            keep = min(i2 - i1, _CONTEXT)
            group.append((tag, i1, i1 + keep, j1, j1 + keep))
        elif i2 - i1 > 2 * _CONTEXT:
            group.append((tag, i1, i1 + _CONTEXT, j1, j1 + _CONTEXT))
            yield group
            group = [(tag, i2 - _CONTEXT, i2, j2 - _CONTEXT, j2)]
        else:
            group.append((tag, i1, i2, j1, j2))
    if any(code[0] != "equal" for code in group):
        yield group
