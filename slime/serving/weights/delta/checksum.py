"""Checksums and compression of deltas, by the names in --update-weight-delta-checksum.

Invariant: a package that is missing is an error that names it, before anything is written.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

from slime.errors import ConfigError, ModelError

Checksum: TypeAlias = Callable[[Any], str]
"""Of anything with bytes."""
_LEVEL = 1


def checksum_of(name: str) -> Checksum:
    """The function behind a name.

    Raises:
        ConfigError: an unknown name, or its package is not installed.
    """
    try:
        if name == "xxh3-128":
            import xxhash

            return lambda data: str(xxhash.xxh3_128_hexdigest(data))
        if name == "blake3":
            import blake3

            return lambda data: str(blake3.blake3(data).hexdigest())
    except ImportError as error:
        raise _missing(name, error) from error
    if name == "adler32":
        return lambda data: f"{zlib.adler32(data):08x}"
    raise ConfigError(f"unknown checksum {name!r}", remedy="xxh3-128, blake3 or adler32")


def compressed(data: Any) -> bytes:
    """A zstd frame of anything with bytes.

    Raises:
        ConfigError: its package is not installed.
    """
    return bytes(_zstd().ZstdCompressor(level=_LEVEL).compress(data))


def decompressed(data: bytes, name: str) -> bytes:
    """What was compressed.

    Raises:
        ModelError: not a whole frame.
    """
    zstd = _zstd()
    try:
        return bytes(zstd.ZstdDecompressor().decompress(data))
    except zstd.ZstdError as error:
        raise ModelError(f"its delta is broken: {error}", place=name) from error


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise _missing("zstd", error) from error
    return zstandard


def _missing(what: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{what} needs a package: {error}", place="--update-weight-mode", remedy="pip install 'slime[delta]'"
    )
