"""From the old and the new bytes of a tensor to what travels, and back.

Invariant: `apply(encode(old, new), old)` is `new`, bit for bit, and a payload that does not fit is refused
before anything is written. Arrays are uint8, one-dimensional. Knows no dtypes and no files.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from slime.errors import ModelError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Encoding: TypeAlias = Literal["xor", "overwrite"]
_WORD = np.dtype("<u4")
_MOST = 2**32
"""Bytes of a tensor whose positions fit a word."""


def encode(encoding: Encoding, old: Bytes, new: Bytes, name: str) -> Bytes:
    """What turns `old` into `new`, of the same length.

    xor: the exclusive or of both. overwrite: the number of bytes that differ, their positions (each a
    little-endian u4), their values.

    Raises:
        ModelError: positions do not fit.
    """
    if encoding == "xor":
        return np.bitwise_xor(old, new)
    if len(new) > _MOST:
        raise ModelError(
            f"has {len(new)} bytes, more than positions can tell",
            place=name,
            remedy="--update-weight-delta-encoding xor",
        )
    positions = np.flatnonzero(old != new)
    words = np.concatenate([[len(positions)], positions]).astype(_WORD)
    return np.concatenate([words.view(np.uint8), new[positions]])


def apply(encoding: Encoding, payload: bytes, target: Bytes, name: str) -> None:
    """Turn `target` into the new bytes, in place.

    Raises:
        ModelError: a payload of another tensor, or a broken one.
    """
    if encoding == "xor":
        if len(payload) != len(target):
            raise _broken(name, f"{len(payload)} bytes for a tensor of {len(target)}")
        np.bitwise_xor(target, np.frombuffer(payload, np.uint8), out=target)
        return
    positions, values = _parts(payload, name)
    if len(positions) and int(positions.max()) >= len(target):
        raise _broken(name, f"position {positions.max()} in a tensor of {len(target)} bytes")
    target[positions] = values


def _parts(payload: bytes, name: str) -> tuple[npt.NDArray[np.uint32], Bytes]:
    size = _WORD.itemsize
    count = int(np.frombuffer(payload, _WORD, count=1)[0]) if len(payload) >= size else -1
    if len(payload) != size + count * (size + 1):
        raise _broken(name, f"{len(payload)} bytes that tell of {count} changes")
    positions = np.frombuffer(payload, _WORD, count=count, offset=size)
    return positions, np.frombuffer(payload, np.uint8, offset=size * (1 + count))


def _broken(name: str, what: str) -> ModelError:
    return ModelError(f"its delta is broken: {what}", place=name)
