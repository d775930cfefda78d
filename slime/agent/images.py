"""Images in messages: their parts, and their places among the tokens of a prompt.

A prompt holds one placeholder token for an image; the engine expands it, and is given the images in the order
of the placeholders. Invariant: an image is never part of a text that is rendered, so it costs no tokenising.
Knows neither templates nor engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from slime.agent.messages import Message

ImageForm: TypeAlias = Literal["image", "image_url"]
STAND_IN = "zqimageqz"
"""What a template is given for the image itself."""
_TEMPLATE_PARTS: Mapping[ImageForm, dict[str, Any]] = {
    "image": {"type": "image", "image": STAND_IN},
    "image_url": {"type": "image_url", "image_url": {"url": STAND_IN}},
}
_SHOWN_BELOW = "[image, shown below]"


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt: the index of its placeholder token, and its URL, ``data:`` as a rule."""

    position: int
    url: str


def moved(images: Iterable[PlacedImage], by: int) -> list[PlacedImage]:
    """The images, with `by` tokens more before them."""
    return [replace(image, position=image.position + by) for image in images]


def has_images(message: Mapping[str, Any]) -> bool:
    """Whether an image is among the parts of a message."""
    content = message.get("content")
    return isinstance(content, list) and any(map(is_image, content))


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def urls_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The URLs of all images, in order."""
    return [
        str(part["image_url"]["url"])
        for m in messages
        if has_images(m)
        for part in m["content"]
        if is_image(part)
    ]


def one_text_between(parts: Sequence[Any]) -> list[Any]:
    """The parts with neighbouring texts as one, a line each: templates put nothing between parts."""
    out: list[Any] = []
    for part in parts:
        if out and is_text(out[-1]) and is_text(part):
            out[-1] = {**part, "text": f"{out[-1]['text']}\n{part['text']}"}
        else:
            out.append(part)
    return out


def is_text(part: Any) -> bool:
    """Whether a part of a content is text."""
    return isinstance(part, Mapping) and part.get("type") == "text"


def template_part(part: Any, form: ImageForm) -> Any:
    """A part as a template takes it."""
    return _TEMPLATE_PARTS[form] if is_image(part) else part


def behind_tools(messages: Sequence[Message]) -> list[Message]:
    """The images of tool messages in a user message behind them, a word in the place of each."""
    out: list[Message] = []
    waiting: list[Any] = []
    for message in messages:
        if message.get("role") != "tool" and waiting:
            out.append({"role": "user", "content": waiting})
            waiting = []
        if message.get("role") == "tool" and has_images(message):
            waiting += [part for part in message["content"] if is_image(part)]
            texts = [
                _SHOWN_BELOW if is_image(part) else str(part.get("text", "")) for part in message["content"]
            ]
            message = {**message, "content": "\n".join(texts)}
        out.append(message)
    return [*out, {"role": "user", "content": waiting}] if waiting else out
