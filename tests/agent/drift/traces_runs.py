"""Requests that fail, break off, are made twice, or meet a limit or other weights."""

from tests.agent.drift.courses import CLAUDE, DONE, EDIT, ENDLESS, LIST, LONG, QWEN, READ, chat, two_calls
from tests.agent.drift.script import (
    Again,
    Trace,
    Turn,
    Version,
    arguments,
    broken_off,
    nothing,
    results,
    say,
    says,
    unnamed,
    whole,
)

RUNS = {
    # Retries
    "a cut stream asked again": Trace(
        steps=(
            say("Go."),
            Turn(says(ENDLESS, slow=0.01), nothing, "abandoned", "cut"),
            Turn(says("y", READ), headers={"X-Stainless-Retry-Count": "1"}),
            results("r"),
            Turn(DONE),
        ),
        real=True,
    ),
    "a cut stream asked again in mid-session": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("r"),
            Turn(says(ENDLESS, slow=0.01), nothing, "abandoned", "cut"),
            Turn(says(ENDLESS, slow=0.01), nothing, "abandoned", "cut"),
            Turn(says("y", LIST)),
            results("r"),
            Turn(DONE),
        ),
        real=True,
    ),
    "a missed answer asked again": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm."), nothing),
            Again(arguments(lambda given: given | {"limit": 9})),
            results("r"),
            Turn(DONE),
        )
    ),
    "asked again while it is answered": Trace(
        steps=(say("Go."), Turn(says("", READ, slow=0.01), how="twice"), results("r"), Turn(DONE))
    ),
    "asked again after an engine's failure": Trace(
        steps=(
            say("Go."),
            Turn(says(pace={"error": (500, "out of memory")}), nothing, status=500),
            Turn(says("", READ), headers={"X-Stainless-Retry-Count": "1"}),
            results("r"),
            Turn(DONE),
        ),
    ),
    "the same prompt for another answer": Trace(
        steps=(say("Go."), Turn(says("one"), nothing), Turn(says("two"), nothing), Turn(says("three"))),
        segments=("wipe", "wipe", "final"),
    ),
    # Broken turns
    "the user interrupts and the client keeps some of what it got": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("r"),
            Turn(says(ENDLESS, slow=0.01), broken_off("[Request interrupted by user]"), "abandoned", "cut"),
            say("Do it otherwise."),
            Turn(DONE),
        ),
        clients=("anthropic", "chat"),
    ),
    "the user interrupts and the client drops what it got": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("r"),
            Turn(says(ENDLESS, slow=0.01), nothing, "abandoned", "cut"),
            say("Do it otherwise."),
            Turn(DONE),
        ),
    ),
    "an answer aborted at the engine, and kept": Trace(
        steps=(say("Go."), Turn(says(ENDLESS, slow=0.01), how="aborted"), say("Go on."), Turn(DONE)),
    ),
    "an answer aborted at the engine, and asked again": Trace(
        steps=(say("Go."), Turn(says(ENDLESS, slow=0.01), nothing, "abandoned", "aborted"), Turn(DONE)),
    ),
    "the engine dies": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            results("r"),
            Turn(says(ENDLESS, slow=0.01), nothing, "abandoned", "died"),
        ),
    ),
    # Limits
    "an answer cut at its limit, and asked again": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ)),
            results("r"),
            Turn(says(LONG), nothing, "abandoned", fields={"max_tokens": 30}),
            Turn(says("y", READ), fields={"max_tokens": 3000}),
            results("r"),
            Turn(DONE),
        ),
        clients=("chat",),
        headers=QWEN,
    ),
    "an answer cut at its limit, and gone on from": Trace(
        steps=(
            say("Go."),
            Turn(says(LONG), fields={"max_tokens": 30}),
            say("Output token limit hit. Resume directly."),
            Turn(says("y", READ)),
            results("r"),
            Turn(DONE),
        ),
        clients=("anthropic", "chat"),
        headers=CLAUDE,
        real=True,
    ),
    "a call cut at its limit": Trace(
        steps=(
            say("Go."),
            Turn(says("", ("edit", {"path": "a.py", "new": LONG})), fields={"max_tokens": 100}),
            results("Error: the input is incomplete"),
            Turn(says("", EDIT)),
            results("ok"),
            Turn(DONE),
        ),
        clients=("anthropic",),
        ill_formed=1,
    ),
    "an answer cut within a character": Trace(
        steps=(
            say("Go."),
            Turn(says("caf\u00e9 \u65e5\u672c"), unnamed, fields={"max_tokens": 8}),
            say("Go on."),
            Turn(says("\U0001f600 is one"), unnamed, fields={"max_tokens": 2}),
            say("Go on."),
            Turn(DONE),
        ),
        clients=("anthropic", "chat"),
        real=True,
    ),
    "stop strings": Trace(
        steps=(
            say("Go."),
            Turn(says("I look. Observation: none"), unnamed, fields={"stop": ["Observation:"]}),
            say("x = 1"),
            Turn(says("Once more.\nObservation: none"), unnamed, fields={"stop": ["Observation:"]}),
            say("x = 2"),
            Turn(says("Done"), unnamed),
        ),
        clients=("chat",),
        real=True,
    ),
    "an empty answer": Trace(
        steps=(
            say("Go."),
            Turn(says("")),
            say("Say something."),
            Turn(says("", READ)),
            results("r"),
            Turn(DONE),
        ),
    ),
    "markers in the midst of an answer": chat(
        says("A turn begins with <|im_start|>user, and <think> opens."), says("b"), says("c"), real=True
    ),
    "more tokens than a sample may have": two_calls(whole, finish={"max_sample_tokens": 850}),
    "more turns than a session may have": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ)),
            results("r"),
            Turn(says("", LIST)),
            results("r"),
            Turn(None),
            say("Go on."),
            Turn(None),
        ),
        adapter={"max_turns_per_sid": 2, "turn_cap_reply": "final_turn"},
    ),
    # Weights
    "weights change in mid-session": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ, think="Hm.")),
            Version("2"),
            results("r"),
            Turn(says("", LIST)),
            Version("3"),
            results("r"),
            Turn(DONE),
        ),
    ),
    "weights change within an answer": Trace(
        steps=(
            say("Go."),
            Turn(says("", READ)),
            results("r"),
            Turn(says(LONG, LIST, slow=0.002), how="reweighted"),
            results("r"),
            Turn(DONE),
        ),
    ),
}
