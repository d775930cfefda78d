"""Codex at work: whatever it makes of an answer, each sampled token is trained once and the run ends."""

import json
import re

import pytest

from slime.agent.adapters.openai import OpenAIAdapter
from slime.serving.scripted import ScriptedAnswer
from tests.clients.policies import Play, raw_call, thinking, tool_call
from tests.clients.suite import act, check

pytestmark = pytest.mark.slow
PATCH = """*** Begin Patch
*** Update File: greet.py
@@
-    return "Helo, " + name
+    return "Hello, " + name
*** End Patch
"""
SPAWN, WAIT = "multi_agent_v1.spawn_agent", "multi_agent_v1.wait_agent"
BUSY = {500: "upstream", 503: "overloaded"}


def codex(play, repo, *, adapter=OpenAIAdapter, **options):
    return act("codex", play, repo, adapter=adapter, **options)


def run(command, **arguments):
    return tool_call("exec_command", cmd=command, **arguments)


def repair():
    """The turns of a repair: read, edit, run."""
    return [
        run("cat greet.py"),
        thinking("One letter is missing.", "It says Helo.\n" + run(f"apply_patch <<'EOF'\n{PATCH}EOF")),
        run("python3 main.py"),
    ]


def is_repaired(repo):
    return (repo / "out.txt").read_text() == "Hello, Zoë"


def said(done):
    """What Codex shows of the model's texts, in order."""
    events = [json.loads(line) for line in done.run.stdout.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item["text"] for item in items if item["type"] == "agent_message"]


def test_a_repair_is_carried_out_and_trained_whole(repo):
    done = codex(Play(repair()), repo)
    check(done)
    assert is_repaired(repo)
    assert len(done.calls) == 4
    assert said(done) == ["It says Helo.", "All done."]


def test_parallel_calls_are_one_turn(repo):
    both = thinking("Two.", "Both at once.\n" + run("echo a > a.txt") + "\n" + run("echo b > b.txt"))
    done = codex(Play([both, *repair()]), repo)
    check(done)
    assert [(repo / name).read_text() for name in ("a.txt", "b.txt")] == ["a\n", "b\n"]
    assert is_repaired(repo)


def test_whitespace_around_calls_and_texts_is_kept(repo):
    leads = ["\n\n", " ", "\t\n", "Look:\n\n\n", "  Look:  ", "Look:\r\n", "é\u00a0\u200b\n"]
    steps = [f"{lead}{run(f'echo {n} >> log.txt')}{lead}" for n, lead in enumerate(leads)]
    steps += [thinking(f"{lead}Hm.{lead}", f"{lead}{run('true')}") for lead in leads]
    done = codex(Play(steps, final="\n\n  All done. \n"), repo)
    check(done)
    assert (repo / "log.txt").read_text().split() == [str(n) for n in range(len(leads))]


def test_malformed_calls_are_trained_and_told_to_be_wrong(repo):
    steps = [
        raw_call("exec_command", '{"cmd": "echo hi", '),
        raw_call("exec_command", '"echo hi"'),
        raw_call("exec_command", '{"cmd": "caf\\u00e9", "cmd": 5}'),
        raw_call("exec_command", '{"wrong": 1}'),
        raw_call("no_such_tool", '{"a": 1}'),
        raw_call("spawn_agent", '{"message": "without its namespace"}'),
        raw_call(SPAWN, "{}"),
        "<tool_call>\nno JSON at all\n</tool_call>" + run("true"),
    ]
    done = codex(Play([*steps, *repair()]), repo)
    check(done)
    assert done.samples[0].metadata["ill_formed"]
    assert is_repaired(repo)


def test_a_subagent_is_a_segment_of_its_own(repo):
    parts = {"PART-1": [run("ls > ls.txt"), "PART-1 found it."]}
    done = codex(Play([spawn("PART-1"), wait, *repair()], parts=parts), repo)
    check(done, segments=["final", "subagent"])
    assert is_repaired(repo)
    assert (repo / "ls.txt").exists()
    assert done.asked.count("PART-1") == 2


def test_two_subagents_at_once_are_two_segments(repo):
    parts = {f"PART-{n}": [run(f"echo {n} > {n}.txt"), f"Part {n} is done."] for n in (1, 2)}
    steps = [spawn("PART-1") + "\n" + spawn("PART-2"), wait, *repair()]
    done = codex(Play(steps, parts=parts), repo)
    check(done, segments=["final", "subagent", "subagent"])
    assert is_repaired(repo)
    assert (repo / "1.txt").exists() and (repo / "2.txt").exists()


def test_a_subagent_that_begins_with_its_parents_history(repo):
    parts = {"PART-1": [run("ls > ls.txt"), "PART-1 found it."]}
    steps = [run("cat greet.py"), spawn("PART-1", fork_context=True), wait, *repair()]
    done = codex(Play(steps, parts=parts), repo)
    check(done, segments=["final", "subagent"])
    assert is_repaired(repo)
    assert (repo / "ls.txt").exists()


def spawn(mark, **arguments):
    return tool_call(SPAWN, message=f"{mark}: look", **arguments)


def wait(seen):
    """Waits for all agents that the last results name."""
    agents = re.findall(r'"agent_id":\s*"([^"]+)"', "\n".join(seen.results))
    return "\n".join(tool_call(WAIT, targets=[agent], timeout_ms=20000) for agent in agents)


def test_compaction_begins_another_row(repo):
    steps = [run("seq 1 3000", max_output_tokens=12000), run("seq 1 2000", max_output_tokens=12000)]
    done = codex(Play([*steps, *repair()]), repo, context_tokens=28_000, max_output_tokens=4_000)
    check(done, segments=["wipe", "wipe", "final"])
    assert done.asked.count("compaction") == 1
    assert is_repaired(repo)


@pytest.mark.parametrize("status", BUSY)
def test_a_request_that_the_engine_fails_is_asked_again(repo, status):
    faults = {2: ScriptedAnswer(error=(status, "out of order"))}
    done = codex(Play(repair(), faults=faults), repo)
    check(done)
    assert is_repaired(repo)


def test_an_answer_that_fails_midway_is_asked_again(repo):
    half = ScriptedAnswer(
        text="Half of an answer " * 5, error=(500, "out of order"), error_after=9, token_latency=0.05
    )
    done = codex(Play(repair(), faults={2: half}), repo)
    check(done, abandoned=1)
    assert is_repaired(repo)


CUTS = ("HTTP/1.1", "output_text.delta", "function_call_arguments.delta", "response.completed")


@pytest.mark.parametrize("before", CUTS)
def test_a_stream_that_is_cut_is_asked_for_again(repo, before):
    """Codex keeps the items that it got whole, and goes on from a call among them."""
    read, edit, test = repair()
    slow = ScriptedAnswer(text=edit, token_latency=0.005)
    done = codex(Play([read, slow, test]), repo, cut=(1, before, before))
    is_whole = before == "response.completed"
    check(done, abandoned=int(not is_whole), untrained=() if is_whole else (1,), unheard=True)
    assert len(done.calls) == (4 if is_whole else 5)
    assert is_repaired(repo)


def test_a_whole_answer_that_is_lost_is_sampled_again(repo):
    done = codex(Play(repair()), repo, cut=(1, "HTTP/1.1", "response.completed"))
    check(done, abandoned=1, untrained=(1,))
    assert is_repaired(repo)


def test_a_slow_first_token_is_waited_for(repo):
    """Codex waits for events: without those that keep it waiting it would ask again after three seconds."""
    slow = ScriptedAnswer(text=run("true"), delay=6)
    done = codex(Play([slow, *repair()]), repo, adapter=Watchful, request_timeout_sec=3)
    check(done)
    assert len(done.calls) == 5
    assert is_repaired(repo)


class Watchful(OpenAIAdapter):
    """Keeps clients waiting at shorter intervals."""

    def protocols(self):
        protocols = super().protocols()
        for protocol in protocols.values():
            protocol.keepalive_seconds = 0.2
        return protocols


def test_the_turn_cap_ends_the_run(repo):
    serve = {"max_turns_per_sid": 2, "turn_cap_reply": "final_turn"}
    done = codex(Play(repair()), repo, serve=serve)
    check(done)
    assert len(done.calls) == 2
    assert done.counters["capped"] == 1


def test_the_turn_cap_ends_a_run_that_only_compacts(repo):
    """A window that the tools alone fill makes it compact before every turn, without end."""
    serve = {"max_turns_per_sid": 12, "turn_cap_reply": "final_turn"}
    steps = [run("true")] * 100
    done = codex(Play(steps), repo, serve=serve, context_tokens=10_000, max_output_tokens=4_000)
    check(done, segments=done.segments)
    assert len(done.calls) == 12
    assert done.counters["capped"] <= 3


def test_a_prompt_that_is_too_long_ends_the_run(repo):
    done = codex(Play(repair()), repo, session={"max_context_tokens": 1000})
    check(done, rc=1, segments=[])
    assert done.calls == []


def test_an_answer_that_is_cut_at_its_limit_is_an_answer(repo):
    done = codex(Play([run("true"), "a b c d e f g h " * 20]), repo, session=limited(60))
    check(done)
    assert done.samples[0].metadata["truncated"]


def test_a_call_that_is_cut_at_its_limit_is_told_to_be_wrong(repo):
    long = run("echo " + "a b c d e f g h " * 20)
    done = codex(Play([run("true"), long, *repair()]), repo, session=limited(150))
    check(done)
    assert is_repaired(repo)


def limited(tokens):
    return {"sampling_defaults": {"max_new_tokens": tokens}}


def test_a_client_that_is_killed_leaves_its_turns(repo):
    slow = ScriptedAnswer(text="word " * 1000, token_latency=0.05)
    done = codex(Play([run("true"), slow]), repo, timeout=15)
    check(done, rc=-1, abandoned=1, untrained=(1,), unheard=True)
    assert any(event.startswith("abort:") for event in done.events)


def test_a_known_models_free_form_tool_is_played(repo):
    steps = [tool_call("apply_patch", input=PATCH), run("python3 main.py")]
    done = codex(Play(steps), repo, model_label="gpt-5.5")
    check(done)
    assert is_repaired(repo)
