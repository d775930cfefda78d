"""Which images of clients reach the engine.

Invariant: the engine is given image data, and a URL only where the adapter's owner allowed it; never a path
or anything else that makes it read files of its host. Knows neither protocols nor tokens.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence

from slime.agent.adapters.exchange import engine_errors
from slime.agent.adapters.wire import AdapterError
from slime.agent.images import PlacedImage, has_images, urls_of
from slime.agent.messages import Message
from slime.agent.template import ChatTemplate
from slime.errors import ConfigError
from slime.utils.engine_client import EngineClient

MAX_IMAGES = 256
"""In one prompt."""
MAX_IMAGE_BYTES = 20 * 2**20
"""Of one image, as base64."""
MAX_PROMPT_BYTES = 64 * 2**20
"""Of all images of a prompt together, as base64."""
_KNOWN_IMAGES = 4096
_DATA = re.compile(r"data:image/(?:png|jpe?g|gif|webp);base64,")
_LINK = re.compile(r"https?://[!-~]{1,8000}\Z")


class ImageGate:
    """Refuses the images that may not pass.

    Args:
        accepts: whether the model takes images; None: if its chat template shows them.
        allow_urls: let the engine fetch ``http`` and ``https`` URLs that clients name.

    Raises:
        ConfigError: `accepts`, but the chat template shows no images.
    """

    def __init__(self, template: ChatTemplate, *, accepts: bool | None, allow_urls: bool) -> None:
        shows = bool(template.report.image_token)
        if accepts and not shows:
            raise ConfigError(
                "the chat template shows no image by a special token of its own",
                place="accepts_images",
                remedy="leave it out, or give the tokenizer the chat template of a model that takes images",
            )
        self._accepts = shows if accepts is None else accepts
        self._takes_tool_images = template.report.fit.tool_images != "refused"
        self._allows_urls = allow_urls
        self._engine_takes_them = False
        self._known: set[int] = set()

    def check(self, messages: Sequence[Message]) -> None:
        """Check the images of a request.

        Raises:
            AdapterError: ``invalid_request``, naming the message.
        """
        for index, message in enumerate(messages):
            if not isinstance(message.get("content"), list):
                continue
            place = f"messages[{index}]"
            if not self._accepts:
                raise _refused(f"{place} holds an image: this model takes text only")
            if message.get("role") == "tool" and not self._takes_tool_images:
                raise _refused(f"{place} holds a tool's image: this model takes images of users only")
            for url in urls_of([message]):
                self._check_url(url, place)

    async def check_engine(self, messages: Sequence[Message], engine: EngineClient) -> None:
        """Ask the engine, once, before it gets images: one that takes none may drop them in silence.

        Raises:
            AdapterError: it takes none, or cannot be asked.
        """
        if self._engine_takes_them or not any(map(has_images, messages)):
            return
        info = await engine_errors(engine.model_info())
        if info.get("has_image_understanding") is False:
            raise _refused("the conversation holds images: the engine's model takes text only")
        self._engine_takes_them = True

    def check_prompt(self, images: Sequence[PlacedImage]) -> None:
        """Check how many images a prompt holds, those of earlier requests among them.

        Raises:
            AdapterError: ``too_large``.
        """
        size = sum(len(image.url) for image in images)
        if len(images) > MAX_IMAGES or size > MAX_PROMPT_BYTES:
            limits = f"{MAX_IMAGES} images and {MAX_PROMPT_BYTES} bytes"
            raise AdapterError(
                "too_large",
                f"the conversation holds {len(images)} images of {size} bytes, more than {limits}",
            )

    def _check_url(self, url: str, place: str) -> None:
        data = _DATA.match(url)
        if data is None:
            self._check_link(url, place)
        elif len(url) > MAX_IMAGE_BYTES:
            raise AdapterError(
                "too_large", f"{place} holds an image of {len(url)} bytes, more than {MAX_IMAGE_BYTES}"
            )
        elif hash(url) not in self._known:
            self._check_data(url[data.end() :], place)
            if len(self._known) >= _KNOWN_IMAGES:
                self._known.clear()
            self._known.add(hash(url))

    def _check_link(self, url: str, place: str) -> None:
        if not _LINK.match(url):
            shown = "data:image/png, jpeg, gif or webp;base64"
            raise _refused(f"{place} holds an image by {url[:40]!r}: only {shown} is read")
        if not self._allows_urls:
            raise _refused(
                f"{place} names an image by URL, which engines do not fetch for clients here: send its data "
                "as base64, or start the adapter with allow_image_urls=True"
            )

    def _check_data(self, data: str, place: str) -> None:
        try:
            is_empty = not binascii.a2b_base64(data, strict_mode=True)
        except ValueError as error:
            raise _refused(f"{place} holds an image that is no base64: {error}") from error
        if is_empty:
            raise _refused(f"{place} holds an empty image")


def _refused(message: str) -> AdapterError:
    return AdapterError("invalid_request", message)
