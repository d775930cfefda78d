"""Finds out, by rendering, whether a chat template shows images: in which form of part, and by which token.

Invariant: the token stands once for each image, nowhere else, and wherever the image stands in a history;
a template that marks images by anything else takes none. Knows no template by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from slime.agent.images import STAND_IN, ImageForm
from slime.agent.messages import Message
from slime.agent.template_fit import TemplateFit
from slime.agent.template_probe import (
    CALL_IDS,
    CALLED,
    MORE,
    SAID,
    TOLD,
    TOOL_NAME,
    USER,
    Renderer,
    TemplateRefusalError,
)
from slime.agent.template_report import TemplateReport

_FORMS: tuple[ImageForm, ...] = ("image", "image_url")
_IMAGE = {"type": "image_url", "image_url": {"url": "-"}}


def with_images(report: TemplateReport, render: Renderer, special: re.Pattern[str]) -> TemplateReport:
    """The report with what the template does with images.

    Args:
        special: matches the tokenizer's special tokens.
    """
    for form in _FORMS:
        probe = _ImageProbe(replace(report.fit, images=form), render, special)
        marks = probe.marks()
        if marks:
            fit = replace(probe.fit, tool_images=probe.tool_images(marks))
            # What opens an image and what closes it stand around its placeholder.
            return replace(report, fit=fit, image_token=marks[len(marks) // 2])
    return report


class _ImageProbe:
    def __init__(self, fit: TemplateFit, render: Renderer, special: re.Pattern[str]) -> None:
        self.fit = fit
        self._render = render
        self._special = special

    def marks(self) -> list[str]:
        """The special tokens that the template writes for an image, in order; none where it takes none."""
        one = self._added([_user(USER, _IMAGE, MORE)], [_user(USER, MORE)], USER, MORE)
        if len(set(one)) < len(one) or not self._is_local():
            return []
        said = {"role": "assistant", "content": SAID}
        three = [_user(USER, _IMAGE, _IMAGE), said, _user(MORE, _IMAGE)]
        return (
            one if self._added(three, [_user(USER), said, _user(MORE)], USER, SAID, MORE) == one * 3 else []
        )

    def tool_images(self, marks: list[str]) -> Literal["inside", "behind", "refused"]:
        """Where an image of a tool message can be shown."""
        if not self.fit.tool_role:
            return "inside"
        function = {"name": TOOL_NAME, "arguments": {"x": CALLED}}
        call = {"id": CALL_IDS[0], "type": "function", "function": function}
        calling: Message = {"role": "assistant", "content": "" if self.fit.tool_calls else CALLED}
        turn = [_user(USER), calling | ({"tool_calls": [call]} if self.fit.tool_calls else {})]
        bare, shown = (
            [*turn, {"role": "tool", "tool_call_id": CALL_IDS[0], "content": content}]
            for content in (TOLD, [_text(TOLD), _IMAGE])
        )
        places: tuple[Literal["inside", "behind"], ...] = ("inside", "behind")
        for place in places:
            probe = _ImageProbe(replace(self.fit, tool_images=place), self._render, self._special)
            if probe._added(shown, [*bare, _user(MORE)] if place == "behind" else bare, USER, TOLD) == marks:
                return place
        return "refused"

    def _added(self, shown: Sequence[Message], bare: Sequence[Message], *texts: str) -> list[str]:
        """Special tokens of the one rendering that the other has none of; none where a text is missing."""
        try:
            text, plain = (self._render(self.fit.messages(messages)) for messages in (shown, bare))
        except TemplateRefusalError:
            return []
        if STAND_IN in text or any(said not in text for said in texts):
            return []
        known = set(self._special.findall(plain))
        return [token for token in self._special.findall(text) if token not in known]

    def _is_local(self) -> bool:
        """Whether a new image looks the same behind a history that has images."""
        histories = (
            [_user(*before), {"role": "assistant", "content": SAID}, _user(MORE, _IMAGE)]
            for before in ([USER], [USER, _IMAGE])
        )
        try:
            tails = {self._render(self.fit.messages(history)).partition(SAID)[2] for history in histories}
        except TemplateRefusalError:
            return False
        return len(tails) == 1


def _user(*parts: Any) -> Message:
    return {"role": "user", "content": [_text(part) if isinstance(part, str) else part for part in parts]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
