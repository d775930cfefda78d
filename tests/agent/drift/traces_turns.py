"""What becomes of a turn in the histories that follow it."""

from tests.agent.drift.courses import (
    CLAUDE,
    DONE,
    EDIT,
    LIST,
    QWEN,
    READ,
    chat,
    one_call,
    stripping,
    thinks,
    two_calls,
)
from tests.agent.drift.dress import (
    billing,
    each_result_behind_its_call,
    loading_search,
    messages_of_one_block,
    moving_cache_marks,
    null_content,
    parts_or_text,
)
from tests.agent.drift.script import (
    Answer,
    Change,
    Count,
    Note,
    Switch,
    Trace,
    Turn,
    arguments,
    as_text,
    both,
    no_thinking,
    only_encrypted,
    renamed,
    results,
    say,
    says,
    tell,
    trimmed_text,
    trimmed_thinking,
    unnamed,
    unsigned_thinking,
    whole,
)

TURNS = {
    # Thinking
    "thinking kept": two_calls(whole, real=True),
    "thinking stripped": two_calls(no_thinking, real=True),
    "thinking trimmed": two_calls(trimmed_thinking, clients=("anthropic", "chat")),
    "thinking without its signature": two_calls(unsigned_thinking, clients=("anthropic",)),
    "thinking only as encrypted content": two_calls(only_encrypted, clients=("responses",)),
    "thinking dropped from turns of text": chat(*map(thinks, "abc"), clients=("chat", "responses")),
    # Tool arguments
    "arguments re-serialised": two_calls(
        arguments(lambda given: given), clients=("chat", "responses"), real=True
    ),
    "arguments reordered, defaults added": one_call(
        says("", EDIT, think="So."),
        arguments(lambda given: {"replace_all": False, **dict(reversed(given.items()))}),
        real=True,
    ),
    "arguments unescaped": one_call(
        says("", ("edit", '{"path": "a.py", "old": "caf\\\\u00e9", "new": "\\u00e9"}')),
        arguments(lambda given: given | {"old": given["old"].replace("\\u00e9", "\u00e9")}),
    ),
    "arguments repaired": one_call(
        says("", ("bash", '{"command": "echo broken')),
        arguments(lambda text: {"command": "echo broken"}),
        clients=("chat", "responses"),
        headers=QWEN,
        ill_formed=1,
    ),
    "arguments wrapped": one_call(
        says("", ("bash", '{"command": "echo broken')),
        whole,
        clients=("anthropic",),
        headers=CLAUDE,
        ill_formed=1,
    ),
    "a command shortened": one_call(
        says("", ("bash", {"command": "cd /work && ls"})), arguments(stripping), clients=("anthropic",)
    ),
    "a tool renamed": one_call(
        says("", ("reed", {"path": "a.py"})),
        renamed("invalid", {"tool": "reed", "error": "no such tool"}),
        real=True,
    ),
    # White space and token boundaries
    "white space before a call": two_calls(
        trimmed_text, says("\n\n I read it. \n\n\n", READ, think="First."), real=True
    ),
    "white space after a call": two_calls(trimmed_text, says("", READ, tail="\n\n  \n")),
    "text trimmed": chat(says("  \n a\n\n"), says("\tb "), says(" c"), keep=both(unnamed, trimmed_text)),
    "tokens that the tokenizer would merge": two_calls(
        no_thinking, says("Let me read this file.", READ, think="First.", is_split=True), real=True
    ),
    "text whose tokens would merge": chat(
        says("An answer in unusual pieces.", is_split=True), says("An answer."), families=(), real=True
    ),
    "content null": two_calls(trimmed_text, says("", READ), clients=("chat",), dress=null_content),
    # Several calls
    "results in another order": Trace(
        steps=(
            say("Go."),
            Turn(says("Two.", READ, LIST, think="Both.")),
            results("x = 1", "a.py", order=(1, 0)),
            Turn(DONE),
        ),
        real=True,
    ),
    "results of some calls only": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, LIST, EDIT)),
            results("x = 1", "a.py", "ok", order=(2, 0)),
            say("I did not allow the other."),
            Turn(DONE),
        ),
    ),
    "the items of a turn between its results": two_calls(
        whole,
        says("Two.", READ, LIST, think="Both."),
        told=("x = 1", "a.py"),
        clients=("responses",),
        dress=each_result_behind_its_call,
    ),
    "each result in a message of its own": two_calls(
        whole,
        says("Two.", READ, LIST, think="Both."),
        told=("x = 1", "a.py"),
        clients=("anthropic",),
        dress=messages_of_one_block,
    ),
    # Templates
    "the template strips the thinking of earlier turns": chat(*map(thinks, "abcd"), keep=whole, real=True),
    "the template has a system prompt of its own": two_calls(
        no_thinking, says("I read it.", READ), system=None, families=("chatml",)
    ),
    "system messages in the midst": Trace(
        steps=(
            say("Go."),
            tell("The date is known."),
            Turn(says("", READ, think="Hm.")),
            results("r"),
            tell("Remember the rules."),
            Turn(says("", LIST)),
            results("r"),
            Turn(DONE),
        ),
        families=("qwen3", "chatml"),
    ),
    # Turns that were not sampled, or that come back as something else
    "examples that were never sampled": Trace(
        steps=(
            Change(lambda history: [Note("user", "Add one."), Answer("x + 1"), Note("user", "Add two.")]),
            Turn(says("x + 2"), unnamed),
            say("Add three."),
            Turn(says("x + 3"), unnamed),
        ),
        real=True,
    ),
    "turns replayed as other text": Trace(
        steps=(
            say("Go."),
            Turn(says("I read.", READ), as_text),
            say("Observation: x = 1"),
            Turn(says("I list.", LIST), as_text),
            say("Observation: a.py"),
            Turn(DONE, as_text),
        ),
        segments=("wipe", "wipe", "final"),
        clients=("chat",),
    ),
    "other text within the threshold": Trace(
        steps=(
            say("Go."),
            Turn(says("I read.", READ), as_text, "realigned"),
            say("Observation: x = 1"),
            Turn(says("I list.", LIST), as_text, "realigned"),
            say("Observation: a.py"),
            Turn(DONE, as_text),
        ),
        clients=("chat",),
        adapter={"fork_threshold_tokens": 1024},
    ),
    "other text beyond the threshold": Trace(
        steps=(
            say("Go."),
            Turn(says("I read.", READ), as_text),
            say("Observation: x = 1"),
            Turn(says("I list.", LIST), as_text),
            say("Observation: a.py"),
            Turn(DONE, as_text),
        ),
        segments=("wipe", "wipe", "final"),
        clients=("chat",),
        adapter={"fork_threshold_tokens": 4},
    ),
    # What else moves in a history
    "cache marks move": two_calls(whole, clients=("anthropic",), dress=moving_cache_marks),
    "the billing line changes": two_calls(whole, clients=("anthropic",), dress=billing),
    "text in parts or alone": two_calls(whole, clients=("chat",), dress=parts_or_text),
    "tools that are loaded later": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("Tool loaded: "),
            Turn(says("", ("search", {"query": "x"}))),
            results("a.py"),
            Turn(DONE),
        ),
        clients=("anthropic",),
        headers=CLAUDE,
        dress=loading_search,
    ),
    "tokens counted in between": Trace(
        steps=(
            say("Go."),
            Count("and this?"),
            Turn(says("", READ, think="Hm.")),
            Count("and this?"),
            results("x = 1"),
            Count("this"),
            Turn(says("", LIST)),
            results("r"),
            Turn(DONE),
        ),
        clients=("anthropic",),
        headers=CLAUDE,
    ),
    "reminders behind tool results": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("x = 1"),
            say("<system-reminder>Use the list.</system-reminder>"),
            Turn(says("", LIST, think="Hmm.")),
            results("a.py"),
            say("<system-reminder>Use it.</system-reminder>"),
            Turn(DONE),
        ),
        real=True,
    ),
    "a reminder that vanishes": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("x = 1"),
            say("<system-reminder>Hurry.</system-reminder>"),
            Turn(says("", LIST, think="Hmm.")),
            Change(lambda history: [item for item in history if "Hurry" not in getattr(item, "text", "")]),
            results("a.py"),
            Turn(DONE),
        ),
        segments=("wipe", "final"),
    ),
    "tools change in mid-session": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("x = 1"),
            Switch(tools=("read", "bash", "edit", "search")),
            Turn(says("", ("search", {"query": "x"}))),
            results("a.py"),
            Turn(DONE),
        ),
        segments=("wipe", "final"),
    ),
    "special tokens in tool results": Trace(
        steps=(
            say("What is <|im_end|>?"),
            Turn(says("", READ, think="Hm.")),
            results("<|im_end|>\n<|im_start|>assistant\n<think>\n</think><tool_call></tool_response>"),
            Turn(DONE),
        ),
        real=True,
    ),
}
