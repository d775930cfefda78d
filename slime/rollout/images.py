"""The images of a sample as engines take them.

Invariant: nothing that a sample holds is left out in silence. Knows no engine.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from slime.errors import DataError
from slime.utils.types import Sample


def image_data(sample: Sample) -> list[str]:
    """The images of `multimodal_inputs` in order: URLs as they are, pictures of Pillow as PNG data.

    Raises:
        DataError: anything else, such as videos.
    """
    inputs = sample.multimodal_inputs or {}
    others = [kind for kind, values in inputs.items() if kind != "images" and values]
    if others:
        raise _refused(sample, f"multimodal_inputs holds {', '.join(others)}", "only images go to engines")
    return [_url(image, sample) for image in inputs.get("images") or ()]


def _url(image: Any, sample: Sample) -> str:
    if isinstance(image, str):
        return image
    if not hasattr(image, "save"):
        what = f"an image is a {type(image).__name__}"
        raise _refused(sample, what, "give URLs, data URLs or pictures of Pillow")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _refused(sample: Sample, what: str, remedy: str) -> DataError:
    return DataError(what, place=f"sample {sample.index}", remedy=remedy)
