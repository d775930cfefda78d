"""What is known of a chat template, as values and in words.

Knows nothing of how it was found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime.agent.template_fit import TemplateFit


@dataclass(frozen=True, kw_only=True)
class TemplateReport:
    """What the probe found.

    Attributes:
        ends: texts of the tokens that end an assistant's turn.
        call_ends: the same for a turn of tool calls, where the turn has an end of its own.
        next_roles: tokens with which any message begins, where that is what ends a turn; else none.
        default_system: what the template puts before the first user message of itself.
        rewrites_history: a turn's text changes when more messages follow, or is not what can be sampled.
        moves_tools: tools stand near the last message; deltas leave them where they first stood.
        tail_needs_tools: new messages look different where there are tools.
        moves_system: the system prompt stands near the last message; deltas leave it where it first stood.
        image_token: the token that stands for an image, once; empty where the template takes none.
        exact_pieces: the tokenizer encodes between special tokens independently, so pieces are cached.
    """

    fit: TemplateFit
    ends: tuple[str, ...] = ()
    call_ends: tuple[str, ...] = ()
    next_roles: tuple[str, ...] = ()
    generation_prompt: str = ""
    opens_reasoning: bool = False
    opens_reasoning_after_tools: bool = False
    default_system: str = ""
    rewrites_history: bool = False
    strips_reasoning: bool = False
    ignores_reasoning: bool = False
    closes_thinking: bool = False
    merges_tool_messages: bool = False
    ignores_tools: bool = False
    moves_tools: bool = False
    tail_needs_tools: bool = False
    moves_system: bool = False
    can_continue: bool = True
    exact_pieces: bool = False
    image_token: str = ""

    @property
    def ends_with_next_role(self) -> bool:
        """Whether a turn has no end of its own: the model samples the beginning of the next message."""
        return bool(self.next_roles)

    @property
    def adds_default_system(self) -> bool:
        """Whether the template has a system prompt of its own."""
        return bool(self.default_system)

    @property
    def refuses_system_in_the_middle(self) -> bool:
        """Whether a system message behind the first is refused, dropped or moved; it becomes user text."""
        return self.fit.system != "anywhere"

    @property
    def needs_tool_call_ids(self) -> bool:
        """Whether tool call ids must have a form, and are replaced by short ones."""
        return self.fit.short_ids

    def lines(self) -> list[str]:
        """The findings in words, for a log at start."""
        if not self.can_continue:
            return ["tokenizer cannot encode text: the whole history is rendered at each turn"]
        end = "the next role's marker" if self.ends_with_next_role else " or ".join(map(repr, self.ends))
        first = f"an assistant's turn begins with {self.generation_prompt!r}, ends with {end or 'nothing'}"
        return [first, *(text for is_true, text in self._findings() if is_true)]

    def _findings(self) -> Iterator[tuple[bool, str]]:
        fit = self.fit
        yield self.opens_reasoning, "the generation prompt opens the reasoning"
        yield self.rewrites_history, "rewrites history: earlier turns are kept as they were sampled instead"
        yield self.strips_reasoning, "strips the reasoning of earlier turns: kept as sampled instead"
        yield self.closes_thinking, "puts empty reasoning into turns without: not done in sampled turns"
        yield self.ignores_reasoning, "shows no reasoning of messages that were not sampled here"
        yield self.adds_default_system, f"adds a system prompt of its own: {self.default_system!r}"
        yield self.merges_tool_messages, "merges consecutive tool messages"
        yield self.moves_tools, "moves tools towards the end: they stay where they first stood"
        yield self.moves_system, "moves the system prompt towards the end: it stays where it first stood"
        yield self.ignores_tools, "TAKES NO TOOLS: the model does not learn which tools there are"
        yield not fit.tool_calls, "shows no tool calls: those that were not sampled here become text"
        yield not fit.tool_role, "takes no tool messages: they become user messages"
        yield fit.system == "first", "takes no system message behind the first: they become reminders"
        yield fit.system == "nowhere", "takes no system message: it becomes text of the user"
        yield not fit.parallel_calls, "takes one tool call a message: parallel calls are shown one by one"
        yield fit.short_ids, "needs tool call ids of nine characters: they are replaced"
        yield not fit.raw_arguments, "takes no malformed arguments: shown as _raw_arguments"
        yield not fit.user_after_tool, "takes no user message after a tool message: joined to it"
        yield fit.content_parts, "takes contents as parts only"
        yield bool(self.image_token), f"takes images, {self.image_token!r} stands for each"
        yield fit.tool_images == "behind", "shows no images of tool messages: they follow in a user message"
        yield fit.tool_images == "refused", "SHOWS NO IMAGES OF TOOL MESSAGES: they are refused"
        yield not fit.repeated_roles, "needs alternating roles: messages of the user are joined"
        yield not self.exact_pieces, "tokenizer does not encode in independent pieces: nothing is cached"
