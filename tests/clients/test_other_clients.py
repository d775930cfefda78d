"""opencode, qwen-code, mini-swe-agent and programs on SDKs at work: whatever the client makes of an answer,
each sampled token is trained once and the run ends."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.openai import OpenAIAdapter
from slime.serving.scripted import ScriptedAnswer
from tests.clients.policies import DONE, Play, raw_call, thinking, tool_call
from tests.clients.suite import act, check

pytestmark = pytest.mark.slow
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIX = """sed -i 's/"Helo/"Hello/' greet.py"""
TEST = "python3 main.py"


@dataclass(frozen=True)
class Client:
    """What a client's tools are called.

    Attributes:
        run: a call that runs a shell command.
        tool: the name of that tool.
        edit: a call that repairs ``greet.py`` of a folder.
        final: the answer that ends a run.
    """

    run: Callable[[str], str]
    tool: str
    edit: Callable[[str], str]
    final: str = DONE
    adapter: type = OpenAIAdapter


def _opencode(adapter=OpenAIAdapter):
    def edit(folder):
        return tool_call("edit", newString="Hello,", filePath=f"{folder}/greet.py", oldString="Helo,")

    return Client(
        lambda command: tool_call("bash", description="x", command=command), "bash", edit, DONE, adapter
    )


def _qwen_run(command):
    return tool_call("run_shell_command", is_background=False, command=command)


def _qwen_edit(folder):
    path = f"{folder}/greet.py"
    return tool_call("read_file", file_path=path) + tool_call(
        "edit", new_string="Hello,", old_string="Helo,", file_path=path
    )


def _bash(command):
    return tool_call("bash", command=command)


def _sed(folder):
    return _bash(FIX)


SDK_KINDS = (
    *("openai_chat", "openai_chat_stream", "openai_responses", "openai_responses_stream"),
    *("openai_responses_stateful", "openai_agents_chat", "openai_agents_responses"),
)
CLIENTS = {
    "opencode": _opencode(),
    "opencode_responses": _opencode(),
    "opencode_anthropic": _opencode(AnthropicAdapter),
    "opencode_titled": _opencode(),
    "opencode_hasty": _opencode(),
    "qwen_code": Client(_qwen_run, "run_shell_command", _qwen_edit),
    "mini_swe_agent": Client(_bash, "bash", _sed, _bash(SUBMIT)),
    **dict.fromkeys(SDK_KINDS, Client(_bash, "bash", _sed)),
}
AGENTS = ("opencode", "qwen_code", "mini_swe_agent")
WORKERS = (*AGENTS, "opencode_responses", "opencode_anthropic", *SDK_KINDS)


def work(name, repo, steps, *, serve=None, **options):
    """Run a client that gets `steps` and its final answer; `faults` and the like are options of `Play`."""
    own = {key: options.pop(key) for key in ("faults", "parts", "final") if key in options}
    play = Play(steps, **{"final": CLIENTS[name].final} | own)
    return act(name, play, repo, adapter=CLIENTS[name].adapter, serve=serve, **options)


def repair(name, repo):
    client = CLIENTS[name]
    edit = thinking("One letter is missing.", "It says Helo.\n" + client.edit(repo))
    return [client.run("cat greet.py"), edit, client.run(TEST)]


def is_repaired(repo):
    return (repo / "out.txt").read_text() == "Hello, Zoë"


@pytest.mark.parametrize("name", WORKERS)
def test_a_repair_is_carried_out_and_trained_whole(name, repo):
    run = CLIENTS[name].run
    leads = ["\n\n", "  Look:  ", "Look:\r\n", "é\u00a0\u200b\n"]
    odd = [
        thinking(f"{lead}Hm.{lead}", f"{lead}{run(f'echo {n} >> log.txt')}{lead}")
        for n, lead in enumerate(leads)
    ]
    both = thinking("Two.", "Both at once.\n" + run("echo a > a.txt") + "\n" + run("echo b > b.txt"))
    done = work(name, repo, [both, *odd, *repair(name, repo)])
    check(done)
    assert len(done.calls) == 9
    assert is_repaired(repo)
    assert (repo / "log.txt").read_text().split() == ["0", "1", "2", "3"]
    assert [(repo / file).read_text() for file in ("a.txt", "b.txt")] == ["a\n", "b\n"]


REFUSES = ("openai_agents_chat", "openai_agents_responses")


def malformed(name):
    tool = CLIENTS[name].tool
    return [
        raw_call(tool, '{"command": "echo hi", '),
        raw_call(tool, '"echo hi"'),
        raw_call(tool, '{"wrong": 1}'),
        raw_call("no_such_tool", '{"a": 1}'),
        "<tool_call>\nno JSON at all\n</tool_call>" + CLIENTS[name].run("true"),
    ]


@pytest.mark.parametrize("name", [name for name in WORKERS if name not in (*REFUSES, "mini_swe_agent")])
def test_malformed_calls_are_trained_and_told_to_be_wrong(name, repo):
    done = work(name, repo, [*malformed(name), *repair(name, repo)])
    check(done)
    assert done.samples[0].metadata["ill_formed"]
    assert is_repaired(repo)


def test_malformed_calls_that_a_client_drops_are_rows_of_their_own(repo):
    """mini-swe-agent keeps its complaint, and not what it complains of."""
    name = "mini_swe_agent"
    faults = {2 * n: ScriptedAnswer(text=text) for n, text in enumerate(malformed(name)[:4])}
    done = work(name, repo, repair(name, repo), faults=faults)
    check(done, segments=["wipe"] * 4 + ["final"])
    assert [sample.metadata["ill_formed"] for sample in done.samples].count(True) >= 2
    assert is_repaired(repo)


OUT_OF_ORDER = (500, "out of order")
TAKE_AN_ERROR_FOR_AN_END = ("opencode_anthropic", "openai_chat_stream", "openai_responses_stream")


@pytest.mark.parametrize("name", WORKERS)
def test_requests_that_the_engine_fails_are_asked_again(name, repo):
    half = ScriptedAnswer(
        text=thinking("Hm.", "Half of an answer " * 5),
        error=OUT_OF_ORDER,
        error_after=20,
        token_latency=0.02,
    )
    faults = {1: ScriptedAnswer(error=OUT_OF_ORDER), 3: half}
    if name in TAKE_AN_ERROR_FOR_AN_END:
        del faults[3]
    done = work(name, repo, repair(name, repo), faults=faults)
    check(done, abandoned=None, untrained=(3,) if 3 in faults else (), unheard=True)
    assert is_repaired(repo)


def slowly(step):
    return ScriptedAnswer(text=step, token_latency=0.005)


@pytest.mark.parametrize("name", AGENTS)
def test_a_stream_that_is_cut_is_asked_for_again(name, repo):
    """qwen-code asks for what follows the text that it got, and then makes one message of both."""
    read, edit, test = repair(name, repo)

    def resume(seen):
        return edit if "<previous_response_suffix>" in seen.ask else test

    done = work(name, repo, [read, slowly(edit), resume], cut=(1, '"arguments":', '"arguments":'))
    segments = ["wipe", "final"] if name == "qwen_code" else ["final"]
    check(done, segments=segments, abandoned=1, untrained=(1,), unheard=True)
    assert is_repaired(repo)


@pytest.mark.parametrize("name", WORKERS)
def test_the_turn_cap_ends_the_run(name, repo):
    serve = {"max_turns_per_sid": 2, "turn_cap_reply": "final_turn"}
    options = {"max_turns": 2} if name == "mini_swe_agent" else {}
    done = work(name, repo, repair(name, repo), serve=serve, **options)
    check(done)
    assert len(done.calls) == 2


@pytest.mark.parametrize("name", AGENTS)
def test_a_prompt_that_is_too_long_ends_the_run(name, repo):
    """opencode has it summarised once."""
    done = work(name, repo, repair(name, repo), session={"max_context_tokens": 500})
    asked = ["compaction"] if name == "opencode" else []
    check(done, rc=1, segments=["wipe"] * len(asked))
    assert done.asked == asked


@pytest.mark.parametrize("name", AGENTS)
def test_an_answer_that_is_cut_at_its_limit_ends_no_run_badly(name, repo):
    session = {"sampling_defaults": {"max_new_tokens": 120}}
    done = work(name, repo, [CLIENTS[name].run("true"), "a b c d e f g h " * 20], session=session)
    check(done, segments=None, abandoned=None, untrained=range(1, 20))


@pytest.mark.parametrize("name", ["opencode_hasty", "qwen_code"])
def test_a_slow_first_token_is_waited_for(name, repo):
    """Both would ask again after three seconds without a byte."""
    slow = ScriptedAnswer(text=CLIENTS[name].run("true"), delay=6)
    options = {"request_timeout_sec": 3} if name == "qwen_code" else {}
    done = act(name, Play([slow, *repair(name, repo)]), repo, adapter=Watchful, **options)
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


def test_the_title_of_a_session_is_a_side_request(repo):
    done = work("opencode_titled", repo, repair("opencode", repo))
    check(done, side=1, untrained=range(1))
    assert done.asked.count("title") == 1
    assert is_repaired(repo)


def task(name, mark):
    if name == "qwen_code":
        return tool_call("agent", description="Look", prompt=f"{mark}: look", subagent_type="general-purpose")
    return tool_call("task", description="Look", prompt=f"{mark}: look", subagent_type="general")


@pytest.mark.parametrize("name", ["opencode", "qwen_code"])
def test_subagents_are_segments_of_their_own(name, repo):
    run = CLIENTS[name].run
    parts = {f"PART-{n}": [run(f"echo {n} > {n}.txt"), f"Part {n} is done."] for n in (1, 2)}
    both = task(name, "PART-1") + "\n" + task(name, "PART-2")
    done = work(name, repo, [both, *repair(name, repo)], parts=parts)
    check(done, segments=["final", "subagent", "subagent"])
    assert is_repaired(repo)
    assert (repo / "1.txt").exists() and (repo / "2.txt").exists()


@pytest.mark.parametrize("name", ["opencode", "qwen_code"])
def test_compaction_begins_another_row(name, repo):
    """What clients keep beside a summary differs, and with it the number of turns that are left."""
    run = CLIENTS[name].run
    steps = [run(f"seq {n} 2500") for n in range(3)] + [run(f"{FIX} && {TEST} # {n}") for n in range(6)]
    done = work(name, repo, steps, context_tokens=30_000, max_output_tokens=4_000)
    check(done, segments=None)
    assert 1 <= done.asked.count("compaction") <= 2
    assert is_repaired(repo)
