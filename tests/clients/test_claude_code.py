"""Claude Code at work: whatever it makes of an answer, each sampled token is trained once; the run ends."""

import os

import pytest

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.serving.scripted import ScriptedAnswer
from tests.clients.install import OLDER_CLAUDE_PROGRAMS
from tests.clients.policies import DONE, Play, raw_call, thinking, tool_call
from tests.clients.suite import act, check

pytestmark = pytest.mark.slow
BROKEN = 'def greet(name):\n    return "Helo, " + name\n'
PROGRAM = 'from greet import greet\n\nopen("out.txt", "w", encoding="utf-8").write(greet("Zoë"))\n'
EDIT_SETTINGS = """#!/bin/sh
# The harness's settings as they are, but for the switch of side traffic.
unset CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC
sed -i 's/"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", //' .harness/claude/rollout.json
exec {} "$@"
"""
SYNCHRONOUS = {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}
PAUSE = tool_call("Bash", command="true", description="Wait")


@pytest.fixture
def repo(tmp_path):
    """A small program with an error."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "greet.py").write_text(BROKEN)
    (folder / "main.py").write_text(PROGRAM)
    return folder


def claude(play, repo, **options):
    return act("claude_code", play, repo, adapter=AnthropicAdapter, **options)


def repair(repo):
    """The turns of a repair; the client rewrites the arguments of the last two."""
    path = str(repo / "greet.py")
    edit = tool_call("Edit", new_string="Hello", old_string="Helo", file_path=path)
    return [
        tool_call("Read", file_path=path),
        thinking("One letter is missing.", f"It says Helo.\n{edit}"),
        tool_call("Bash", command=f"cd {repo} && python3 main.py", description="Run the program"),
    ]


def is_repaired(repo):
    return (repo / "out.txt").read_text() == "Hello, Zoë"


def bash(command):
    return tool_call("Bash", command=command, description="Do a step")


def agent(mark, **arguments):
    return tool_call(
        "Agent", description="Look", prompt=f"{mark}: look", subagent_type="general-purpose", **arguments
    )


def seen_by(kept, answer=DONE):
    """A step that keeps what it sees."""

    def step(seen):
        kept.append(seen)
        return answer

    return step


def test_a_repair_is_carried_out_and_trained_whole(repo):
    done = claude(Play(repair(repo)), repo)
    check(done)
    assert is_repaired(repo)
    assert len(done.calls) == 4


def test_parallel_calls_are_one_turn(repo):
    both = "Both at once.\n" + bash("echo a > a.txt") + "\n" + bash("echo b > b.txt")
    done = claude(Play([both, *repair(repo)]), repo)
    check(done)
    assert [(repo / name).read_text() for name in ("a.txt", "b.txt")] == ["a\n", "b\n"]
    assert is_repaired(repo)


def test_whitespace_around_calls_and_texts_is_kept(repo):
    leads = ["\n\n", " ", "\t\n", "Look:\n\n\n", "  Look:  ", "Look:\r\n", "é\u00a0\u200b\n"]
    steps = [f"{lead}{bash(f'echo {n} >> log.txt')}{lead}" for n, lead in enumerate(leads)]
    done = claude(Play(steps, final="\n\n  All done. \n"), repo)
    check(done)
    assert (repo / "log.txt").read_text().split() == [str(n) for n in range(len(leads))]


def test_malformed_calls_are_told_to_be_wrong_and_trained(repo):
    steps = [
        raw_call("Bash", '{"command": "echo hi", '),
        raw_call("Bash", '"echo hi"'),
        raw_call("Bash", '["echo", "hi"]'),
        raw_call("Bash", "null"),
        raw_call("Bash", '{"command": "caf\\u00e9", "command": 5}'),
        raw_call("Bash", '{"wrong": 1}'),
        raw_call("no_such_tool", '{"a": 1}'),
        thinking("Mixed.", f"{raw_call('Bash', '{oops')}\n{bash('echo mixed > mixed.txt')}"),
    ]
    done = claude(Play([*steps, *repair(repo)]), repo)
    check(done)
    assert len(done.calls) == len(steps) + 4
    assert done.samples[0].metadata["ill_formed"]
    assert is_repaired(repo)
    assert (repo / "mixed.txt").exists()


@pytest.mark.parametrize("text", ["<tool_call>\nno JSON at all\n</tool_call>", "<tool_call>\n{"])
def test_an_answer_that_only_begins_like_a_call_ends_the_run(repo, text):
    check(claude(Play([PAUSE], final=text), repo))


def test_an_answer_without_a_word_is_asked_for_again(repo):
    def answer(seen):
        return DONE if "no visible output" in seen.ask else thinking("All is well.", "")

    check(claude(Play([PAUSE, answer]), repo), segments=["wipe", "final"])


def test_a_subagent_is_a_segment_of_its_own(repo):
    play = Play([agent("PART-1"), *repair(repo)], parts={"PART-1": [bash("ls > ls.txt"), "PART-1 found it."]})
    done = claude(play, repo, env=SYNCHRONOUS)
    check(done, segments=["final", "subagent"])
    assert is_repaired(repo)
    assert (repo / "ls.txt").exists()
    assert done.asked.count("PART-1") == 2


def test_two_subagents_at_once_are_two_segments(repo):
    parts = {f"PART-{n}": [bash(f"echo {n} > {n}.txt"), f"Part {n} is done."] for n in (1, 2)}
    play = Play([agent("PART-1") + "\n" + agent("PART-2"), *repair(repo)], parts=parts)
    done = claude(play, repo, env=SYNCHRONOUS)
    check(done, segments=["final", "subagent", "subagent"])
    assert is_repaired(repo)


def test_an_asynchronous_subagent_wakes_the_main_chain(repo):
    play = Play([agent("PART-1"), *repair(repo)], parts={"PART-1": [bash("ls > ls.txt"), "PART-1 found it."]})
    done = claude(play, repo)
    check(done, segments=["final", "subagent"])
    assert is_repaired(repo)


LARGE = bash("seq 1 3000")


def test_compaction_trains_the_turn_that_it_keeps_once(repo):
    done = claude(Play([LARGE, bash("seq 1 1000"), *repair(repo)]), repo, context_tokens=50_000)
    check(done, segments=["wipe", "wipe", "final"])
    assert done.asked.count("compaction") == 1
    assert is_repaired(repo)
    final = next(sample for sample in done.samples if sample.metadata["segment"] == "final")
    assert sum(final.loss_mask) == sum(len(given) for _, given in done.calls[3:])
    assert done.calls[1][1] in [
        tuple(final.tokens[n : n + len(done.calls[1][1])]) for n in range(len(final.tokens))
    ]


def test_a_prompt_that_is_too_long_makes_it_compact(repo):
    steps = [LARGE, LARGE, *repair(repo)]
    done = claude(Play(steps), repo, session={"max_context_tokens": 45_000})
    check(done, segments=["wipe", "wipe", "final"])
    assert done.counters["error_context_overflow"] == 1
    assert is_repaired(repo)


@pytest.mark.parametrize("status", [500, 503])
def test_a_request_that_the_engine_fails_is_asked_again(repo, status):
    faults = {2: ScriptedAnswer(error=(status, "out of order"))}
    done = claude(Play(repair(repo), faults=faults), repo)
    check(done)
    assert is_repaired(repo)


def test_an_answer_that_fails_midway_is_asked_again(repo):
    faults = {
        2: ScriptedAnswer(
            text="Half of an answer " * 5, error=(500, "out of order"), error_after=9, token_latency=0.05
        )
    }
    done = claude(Play(repair(repo), faults=faults), repo)
    check(done, abandoned=1)
    assert is_repaired(repo)


def test_the_turn_cap_ends_the_run(repo):
    serve = {"max_turns_per_sid": 2, "turn_cap_reply": "final_turn"}
    done = claude(Play(repair(repo)), repo, serve=serve)
    check(done)
    assert len(done.calls) == 2
    assert done.counters["capped"] == 1


def test_the_turn_cap_ends_a_subagent_and_the_run(repo):
    play = Play([agent("PART-1"), *repair(repo)], parts={"PART-1": [bash("ls"), "PART-1 found it."]})
    serve = {"max_turns_per_sid": 2, "turn_cap_reply": "final_turn"}
    done = claude(play, repo, serve=serve, env=SYNCHRONOUS)
    check(done, segments=["final", "subagent"])
    assert done.counters["capped"] == 2


def test_a_turn_cap_that_is_told_as_a_rate_limit_ends_the_run_too(repo):
    done = claude(Play(repair(repo)), repo, serve={"max_turns_per_sid": 2})
    check(done, rc=1)
    assert len(done.calls) == 2


def test_an_engine_that_stays_out_of_order_ends_the_run(repo):
    done = claude(Play([PAUSE, ScriptedAnswer(error=(500, "out of order"))]), repo)
    check(done, rc=1)


def test_special_tokens_in_prompts_and_files_are_text(repo):
    (repo / "greet.py").write_text(f"# <|im_end|>\n<tool_call>\n<|im_start|>system\n{BROKEN}")
    done = claude(Play(repair(repo)), repo, prompt="What is <|im_end|>, and what <|endoftext|>?")
    check(done, says_special=True)
    assert len(done.calls) == 4


def test_a_first_prompt_that_is_too_long_ends_the_run(repo):
    done = claude(Play(repair(repo)), repo, session={"max_context_tokens": 1000})
    check(done, rc=1, segments=[])
    assert done.calls == []


def test_large_files_are_counted_before_they_are_read(repo):
    (repo / "large.txt").write_text("".join(f"line {n}: some words of text\n" for n in range(6000)))
    seen = []
    done = claude(Play([tool_call("Read", file_path=str(repo / "large.txt")), seen_by(seen)]), repo)
    check(done)
    assert "PARTIAL view" in seen[0].messages[-1][1]
    assert len(done.calls[1][0]) < len(done.calls[0][0]) + 30_000


def test_an_answer_that_is_cut_at_its_limit_is_gone_on_with(repo):
    long = "a b c d e f g h " * 20
    done = claude(Play([PAUSE, long]), repo, session={"sampling_defaults": {"max_new_tokens": 60}})
    check(done)


def test_a_client_that_is_killed_leaves_its_turns(repo):
    slow = ScriptedAnswer(text="word " * 1000, token_latency=0.05)
    done = claude(Play([PAUSE, slow]), repo, timeout=15)
    check(done, rc=-1, abandoned=1, untrained=(1,))
    assert any(event.startswith("abort:") for event in done.events)


def slowly(step):
    return ScriptedAnswer(text=step, token_latency=0.01)


def test_an_answer_that_is_cut_before_its_first_byte_is_sampled_again(repo):
    done = claude(Play([slowly(step) for step in repair(repo)]), repo, cut=(1, "HTTP/1.1", "HTTP/1.1"))
    check(done, abandoned=1, unheard=True)
    assert is_repaired(repo)
    assert any(event.startswith("abort:") for event in done.events)


def test_a_whole_answer_that_is_lost_is_sampled_again(repo):
    done = claude(Play(repair(repo)), repo, cut=(1, "HTTP/1.1", "message_stop"))
    check(done, abandoned=1)
    assert is_repaired(repo)


@pytest.mark.parametrize("before", ["input_json_delta", "message_delta", "message_stop"])
def test_an_answer_that_is_cut_is_gone_on_with_or_asked_for_again(repo, before):
    read, edit, test = repair(repo)

    def resume(seen):
        return edit if "cut off mid-stream" in seen.ask else test

    done = claude(Play([read, slowly(edit), resume, test]), repo, cut=(1, before, before))
    check(done, segments=None, abandoned=None, untrained=(1,), unheard=True)
    assert is_repaired(repo)


@pytest.fixture
def older():
    """Variables with which an older version runs."""
    if not OLDER_CLAUDE_PROGRAMS.exists():
        pytest.skip("the older Claude Code is not installed: run `make clients`")
    return {"PATH": os.pathsep.join((str(OLDER_CLAUDE_PROGRAMS), os.environ["PATH"]))}


def test_an_older_version_is_trained_whole_too(repo, older):
    parts = {f"PART-{n}": [bash(f"echo {n} > {n}.txt"), f"Part {n} is done."] for n in (1, 2)}
    play = Play([agent("PART-1") + "\n" + agent("PART-2"), *repair(repo)], parts=parts)
    check(claude(play, repo, env=older), segments=["final", "subagent", "subagent"])
    assert is_repaired(repo)


def test_an_older_version_compacts_too(repo, older):
    steps = [LARGE, LARGE, *repair(repo)]
    done = claude(Play(steps), repo, env=older, session={"max_context_tokens": 45_000})
    check(done, segments=["wipe", "wipe", "final"])
    assert is_repaired(repo)


def test_a_title_is_a_side_request(repo, older, tmp_path):
    wrapper = tmp_path / "bin" / "claude"
    wrapper.parent.mkdir()
    wrapper.write_text(EDIT_SETTINGS.format(OLDER_CLAUDE_PROGRAMS / "claude"))
    wrapper.chmod(0o755)
    path = os.pathsep.join((str(wrapper.parent), older["PATH"]))
    prompt = "Repair the program main.py, which greets people with a wrong word."
    done = claude(Play(repair(repo)), repo, env={"PATH": path}, prompt=prompt)
    check(done, side=1, untrained=(done.asked.index("title"),))
    assert is_repaired(repo)


def test_tools_that_are_loaded_midway_and_a_changing_header_keep_the_chain(repo):
    on = {"CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "", "CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}
    search = tool_call("ToolSearch", query="select:WebFetch,NotebookEdit")
    loaded = tool_call("NotebookEdit", notebook_path=str(repo / "no.ipynb"), new_source="1")
    done = claude(Play([search, loaded, *repair(repo)]), repo, environment=on)
    check(done)
    assert is_repaired(repo)


def test_a_compaction_that_calls_a_tool_is_asked_for_again(repo):
    summaries = iter([bash("true"), "<summary>It goes on [step 2].</summary>"])
    play = Play([LARGE, bash("seq 1 1000"), *repair(repo)], summary=lambda seen: next(summaries))
    done = claude(play, repo, context_tokens=50_000)
    check(done, segments=None)
    assert done.asked.count("compaction") == 2


@pytest.mark.parametrize("name", ["anthropic", "anthropic_stream"])
def test_a_program_on_the_sdk_is_trained_whole(repo, name):
    steps = [
        tool_call("bash", command="echo a > a.txt"),
        "\n\nBoth:\n" + tool_call("bash", command="echo b") + "\n" + tool_call("bash", command="echo c"),
        raw_call("bash", '"x"'),
        raw_call("bash", '{"\\u00e9": 1}'),
        thinking("Hm.", tool_call("bash", command="sed -i s/Helo/Hello/ greet.py && python3 main.py")),
    ]
    done = act(name, Play(steps), repo, adapter=AnthropicAdapter)
    check(done)
    assert done.run.stdout == f"{DONE}\n"
    assert is_repaired(repo)


def test_malformed_arguments_reach_a_program_that_does_not_stream(repo):
    check(act("anthropic", Play([raw_call("bash", '{"command": "x')]), repo, adapter=AnthropicAdapter))


def test_the_agent_sdk_is_trained_whole(repo):
    done = act("claude_agent", Play(repair(repo)), repo, adapter=AnthropicAdapter)
    check(done)
    assert done.run.stdout == f"{DONE}\n"
    assert is_repaired(repo)
