"""Which folders slime may replace: those that it wrote itself, and empty ones.

Invariant: a folder that slime writes carries the file `MARKER`; what any other folder holds is
never removed. Knows nothing of what the folders hold. Torch-free.
"""

from __future__ import annotations

import json
from pathlib import Path

MARKER = ".slime"
FORMAT = 1


def mark(folder: Path) -> None:
    """Note that slime wrote `folder`."""
    (folder / MARKER).write_text(json.dumps({"format": FORMAT}) + "\n")


def may_replace(path: Path) -> bool:
    """Whether nothing of the user's goes away with `path`: it is absent, an empty folder, or marked."""
    if not path.is_dir():
        return not (path.exists() or path.is_symlink())
    return (path / MARKER).is_file() or not any(path.iterdir())
