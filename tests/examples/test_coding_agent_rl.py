"""The coding-agent example: tasks, verdicts, rollouts with a small agent, and with the real ones."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.coding_agent_rl.generate import generate
from examples.coding_agent_rl.grading import AbortedError, Task, grade
from examples.coding_agent_rl.make_data import make, make_repository, row, run_script, solution, task_names
from examples.coding_agent_rl.make_tiny_model import make as make_tiny_model
from examples.coding_agent_rl.run_scripted import roll
from examples.coding_agent_rl.scripted_policy import edits_of
from examples.coding_agent_rl.service import Service
from slime.agent.harness import HARNESSES, BaseHarness, run_agent, user_settings
from slime.agent.sandbox import DockerSandbox, LocalSandbox
from slime.errors import ConfigError
from slime.rollout.hooks import load_hook
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.utils.types import Sample
from tests.agent.templates import family_tokenizer
from tests.agent.tokenizers import FOLDER, real_tokenizer
from tests.clients.clients import NODE_PROGRAMS, available

ROOT = Path(__file__).parents[2]
ASK = """
import json, os, subprocess, sys, time, urllib.request
def ask(*texts):
    body = {"model": "x", "messages": [{"role": "user", "content": text} for text in texts]}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode())
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
def patch(text):
    subprocess.run(["git", "apply"], input=text.encode(), check=True)
"""


class ProgramHarness(BaseHarness):
    """An agent that is a Python program, run by the sandbox's own Python."""

    name = "program"
    variables = "PROGRAM"

    def __init__(self, program):
        self.program = ASK + program

    async def install_cli(self, sb):
        await sb.write_file("/tmp/agent.py", self.program)

    async def write_config(self, sb, ctx):
        return None

    async def launch_and_wait(self, sb, ctx, prompt, budget):
        env, settings = {"URL": ctx.openai_url}, user_settings(self.variables)
        command = ("python3", "-B", "/tmp/agent.py")
        return await run_agent(sb, ctx, command, prompt=prompt, budget=budget, env=env, settings=settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    family_tokenizer("qwen3").save_pretrained(folder)
    return folder


@contextmanager
def environment(**values):
    """The example's variables, for a while."""
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def rollout(model, tmp_path, monkeypatch):
    """A function that gives the samples of one rollout of an agent that is the given program."""

    def run(program, *, name="pages", metadata=None, answer=None, **variables):
        monkeypatch.setitem(HARNESSES, "program", ProgramHarness(program))
        given = row(name, make_repository(name, tmp_path / "repo"))
        given["metadata"] |= metadata or {}
        sample = Sample(
            prompt=given["input"], metadata=given["metadata"], index=7, group_index=3, rollout_id=7
        )
        answer = answer or ScriptedAnswer(text="done")
        variables = {"SWE_AGENT": "program", "SWE_BOOT_RETRIES": 0} | variables
        with start_scripted_server(lambda call: answer, family_tokenizer("qwen3")) as server:
            host, _, port = server.url.removeprefix("http://").rpartition(":")
            args = SimpleNamespace(
                hf_checkpoint=str(model),
                sglang_router_ip=host,
                sglang_router_port=port,
                run_dir=str(tmp_path),
                rollout_timeout=3600.0,
            )
            with environment(**variables):
                return asyncio.run(generate(args, sample, {"max_new_tokens": 64, "temperature": 1.0}))

    return run


def repair(name="pages"):
    return f"patch({solution(name)!r})\n"


def reason(samples):
    """Why a rollout has no reward; that it has none."""
    (sample,) = samples
    assert sample.status is Sample.Status.ABORTED
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([0, 0], 1, [0])
    assert sample.reward is None and sample.remove_sample
    assert (sample.index, sample.group_index, sample.rollout_id) == (7, 3, 7)
    return sample.metadata["abort_reason"]


# Tasks


def run_tests(name, folder):
    """Names of the tests that pass in a repository."""
    tests = json.loads((ROOT / "examples/coding_agent_rl/tasks" / name / "tests.json").read_text())
    script = run_script([*tests["FAIL_TO_PASS"], *tests["PASS_TO_PASS"]])
    out = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split() for line in out.splitlines()]
    assert {test for _, test in lines} == {test for kind in tests.values() for test in kind}
    return {test for status, test in lines if status == "PASSED"}, tests


@pytest.mark.parametrize("name", task_names())
def test_a_tasks_tests_fail_before_its_solution_and_pass_after(name, tmp_path):
    folder = make_repository(name, tmp_path / "repo")
    before, tests = run_tests(name, folder)
    assert before == set(tests["PASS_TO_PASS"])
    functions = sum(path.read_text().count("    def test_") for path in folder.glob("tests/test_*.py"))
    assert functions == sum(map(len, tests.values()))
    subprocess.run(["git", "apply"], input=solution(name).encode(), cwd=folder, check=True)
    after, _ = run_tests(name, folder)
    assert after == before | set(tests["FAIL_TO_PASS"])


def test_rows_hold_what_the_hook_needs_and_no_solution(tmp_path):
    rows = [json.loads(line) for line in make(tmp_path).read_text().splitlines()]
    assert [item["metadata"]["instance_id"] for item in rows] == task_names()
    assert len({item["input"].splitlines()[0] for item in rows}) == len(rows) == 8
    for item in rows:
        name, task = item["metadata"]["instance_id"], Task.of(item["metadata"])
        assert (Path(task.image) / ".git").is_dir() and task.must_pass
        assert all(edit.new not in json.dumps(item) for edit in edits_of(solution(name)))


# Verdicts


@pytest.fixture
def verdict(tmp_path):
    """A function that grades a patch of a task."""

    def run(patch, *, name="pages", seconds=60, require=None, **metadata):
        given = row(name, make_repository(name, tmp_path / "repo"))["metadata"] | metadata

        async def graded():
            async with LocalSandbox(given["image"], workdir=given["workdir"], require=require) as box:
                return await grade(box, Task.of(given), patch, seconds)

        return asyncio.run(graded())

    return run


def test_a_solution_is_rewarded_and_an_empty_patch_is_not(verdict):
    assert verdict(solution("pages")).reward == 1.0
    unsolved = verdict("")
    assert unsolved.reward == 0.0
    assert len(unsolved.missing) == 2 and "AssertionError" in unsolved.output


def test_a_box_without_namespaces_gives_verdicts_too(verdict):
    assert verdict(solution("pages"), require="plain").reward == 1.0
    assert verdict("", require="plain").reward == 0.0


def test_a_repair_that_breaks_something_else_is_not_rewarded(verdict):
    broken = solution("pages").replace("max(1, ", "max(0, ")
    assert verdict(broken).missing == ("tests.test_pages.PagesTest.test_nothing",)


def new_file(path, *lines):
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


@pytest.mark.parametrize(
    "patch",
    [
        new_file(
            "unittest.py", "print('PASSED tests.test_pages.PagesTest.test_all_full')", "raise SystemExit(0)"
        ),
        new_file("sitecustomize.py", "import os", "os._exit(0)"),
        new_file("tests/conftest.py", "def pytest_runtest_makereport(item, call): pass"),
        new_file(
            "sitecustomize.py",
            "import glob",
            "for path in glob.glob('.harness/grading/*'): open(path, 'w').write('PASSED x')",
        ),
        solution("pages").replace("+        return max", "+        import os; return os._exit(0) or max"),
    ],
    ids=["shadows unittest", "sitecustomize", "conftest", "overwrites the report", "ends the process"],
)
def test_code_that_games_the_tests_is_not_rewarded(verdict, patch):
    assert verdict(patch).reward == 0.0


@pytest.mark.parametrize(
    ("patch", "metadata", "why"),
    [
        ("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", {}, "patch_does_not_apply"),
        ("", {"run_script": "sleep 60", "seconds": 1}, "timeout"),
        ("", {"run_script": "no-such-runner"}, "cannot_run"),
        ("", {"parser": "raise SystemExit(3)"}, "parser_failed"),
        ("", {"parser": "pass"}, "no_report"),
        ("", {"parser": "import sys; open(sys.argv[3], 'w').write('[]')"}, "bad_report"),
        ("", {"run_script": "", "eval_cmd": "no-such-command"}, "cannot_run"),
        ("", {"run_script": "", "f2p_script": "def test(): pass"}, "no_pytest"),
    ],
)
def test_law_4_what_cannot_be_evaluated_has_no_verdict(verdict, patch, metadata, why):
    with pytest.raises(AbortedError) as caught:
        verdict(patch, **metadata)
    assert caught.value.message == f"unevaluatable:{why}"


def test_a_command_can_be_the_test(verdict):
    command = {"run_script": "", "eval_cmd": "python3 -m unittest -q tests.test_pages"}
    assert verdict(solution("pages"), **command).reward == 1.0
    assert verdict("", **command).reward == 0.0


# Rollouts, with a small agent


def test_a_repair_is_rewarded_and_its_session_trained(rollout):
    (sample,) = rollout("ask('repair it')\n" + repair())
    assert (sample.reward, sample.rollout_id, sample.group_index) == (1.0, 7, 3)
    assert sum(sample.loss_mask) == sample.metadata["trajectory"]["tokens"] == len("done") + 1
    assert sample.metadata["patch"].count("diff --git") == 1
    assert Path(sample.metadata["agent_log"]).is_file()


def test_the_agent_finds_the_issue_and_its_tests_are_not_what_counts(rollout):
    program = "issue = open('PROBLEM_STATEMENT.md').read()\nassert issue.startswith('# An empty page')\n"
    program += "open('tests/test_pages.py', 'w').write('')\nask(issue)\n"
    (sample,) = rollout(program)
    assert sample.reward == 0.0 and len(sample.metadata["tests_missing"]) == 2


def test_work_that_the_agent_committed_counts(rollout):
    commit = "subprocess.run('git -c user.name=a -c user.email=a@b commit -qam x', shell=True, check=True)\n"
    (sample,) = rollout("ask('repair it')\n" + repair() + commit)
    assert sample.reward == 1.0
    assert "PROBLEM_STATEMENT" not in sample.metadata["patch"] and ".harness" not in sample.metadata["patch"]


def test_siblings_share_rollout_id_and_reward(rollout):
    samples = rollout("ask('one thing')\nask('another thing')\n" + repair())
    assert len(samples) == 2
    assert {(sample.rollout_id, sample.reward) for sample in samples} == {(7, 1.0)}
    assert sum(sum(sample.loss_mask) for sample in samples) == samples[0].metadata["trajectory"]["tokens"]


@pytest.mark.parametrize(
    ("program", "options", "why"),
    [
        ("ask('x')", {"metadata": {"image": None}}, "missing_image_or_workdir"),
        ("ask('x')", {"metadata": {"workdir": ""}}, "missing_image_or_workdir"),
        ("ask('x')", {"metadata": {"run_script": ""}}, "unevaluatable:no_tests"),
        ("ask('x')", {"metadata": {"parser": "raise SystemExit(1)"}}, "unevaluatable:parser_failed"),
        ("pass", {}, "adapter_session_empty"),
        ("ask('x'); time.sleep(60)", {"SWE_AGENT_TIME_BUDGET_SEC": 1}, "wall_clock_timeout"),
        ("ask('x'); time.sleep(60)", {"SWE_ROLLOUT_GUARD_SEC": 2}, "wall_clock_timeout"),
        ("ask('x'); sys.exit(3)", {}, "exception:AgentFailedError"),
        ("ask('x')", {"answer": ScriptedAnswer(error=(400, "broken"))}, "exception:AgentFailedError"),
        ("ask('x')", {"metadata": {"image": "/nowhere"}}, "exception:SandboxError"),
    ],
)
def test_law_4_a_failure_is_never_a_reward(rollout, program, options, why):
    assert reason(rollout(repair() + program, **options)) == why


@pytest.mark.parametrize(
    "variables",
    [
        {"SWE_AGENT": "gpt"},
        {"SWE_SANDBOX": "docker"},
        {"SWE_SANDBOX": "e2b", "SWE_AGENT_PREFIX": "/usr", "ADAPTER_PUBLIC_HOST": "here"},
        {"SWE_ROLLOUT_GUARD_SEC": 4000},
        {"SWE_TRAIN_PROTOCOL": "swebench"},
        {"SWE_EVAL_TIMEOUT_SEC": "soon"},
        {"SWE_AGENT_PREFIX": "/nowhere"},
    ],
)
def test_settings_that_cannot_work_end_the_run(rollout, variables):
    with pytest.raises(ConfigError) as caught:
        rollout("ask('x')", **variables)
    assert caught.value.place in (*variables, "ADAPTER_PUBLIC_HOST", "--rollout-timeout")


def test_a_remote_sandbox_is_told_the_public_host():
    async def url():
        service = Service(None, SimpleNamespace(port=18001), "trainer.example")
        async with service.reachable(DockerSandbox("image")) as reached:
            return reached

    assert asyncio.run(url()) == "http://trainer.example:18001"


def test_the_hook_fits_its_flag():
    load_hook("examples.coding_agent_rl.generate.generate", "custom_generate_function_path")


# Rollouts, with the real agents

REAL = ("claude_code", "codex")


def require(agent):
    real_tokenizer("qwen3")
    if not available(agent):
        pytest.skip(f"{agent} is not installed: run `make clients`")


@pytest.mark.slow
@pytest.mark.parametrize("agent", REAL)
def test_a_real_agent_is_rewarded_for_repairs_and_a_step_trains_on_it(agent, tmp_path):
    require(agent)
    tokenizer = FOLDER / "qwen3"
    with environment(SWE_AGENT_PREFIX=NODE_PROGRAMS.parent):
        samples, sampled = roll(agent, tokenizer, tmp_path, tasks=3, samples=2, at_once=2)
    rewards = {}
    for sample in samples:
        rewards.setdefault(sample.metadata["instance_id"], []).append(sample.reward)
    assert len(rewards) == 3 and all(sorted(given) == [0.0, 1.0] for given in rewards.values()), rewards
    assert sum(sum(sample.loss_mask) for sample in samples) == sampled > 0
    flags = {
        "load-debug-rollout-data": tmp_path / "rollouts" / "{rollout_id}.jsonl",
        "rollout-batch-size": 3,
        "run-dir": tmp_path / "train",
    }
    step = train(tmp_path, flags)
    assert step["train/tokens"] == sampled and step["train/rollouts"] == 6
    assert step["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("agent", REAL)
def test_a_real_agent_on_the_embedded_engine_ends_and_is_trained(agent, tmp_path):
    require(agent)
    variables = {"SWE_AGENT": agent, "SWE_AGENT_PREFIX": NODE_PROGRAMS.parent, "SWE_MAX_TURNS": 2}
    flags = {
        "prompt-data": make(tmp_path / "data"),
        "custom-generate-function-path": "examples.coding_agent_rl.generate.generate",
        "rollout-batch-size": 1,
        "rollout-max-response-len": 32,
        "rollout-max-context-len": 40000,
        "rollout-timeout": 2700,
        "engine-num-threads": 1,
        "run-dir": tmp_path / "train",
    }
    with environment(**variables):
        step = train(tmp_path, flags)
    assert step["rollout/raw_reward"] == 0.0
    assert step["agent/trained_share"] == 1.0 and 1 <= step["agent/turns"] <= 2
    assert step["rollout/accounting/trained"] == 2
    assert step["train/train_rollout_logprob_abs_diff"] < 1e-4


def train(folder, flags):
    """The metrics of one step of `slime train` on the tiny model."""
    model = make_tiny_model(FOLDER / "qwen3", folder / "tiny")
    flags = {
        "hf-checkpoint": model,
        "num-rollout": 1,
        "n-samples-per-prompt": 2,
        "lr": 1e-3,
        "train-precision": "float32",
        "train-num-threads": 1,
        "max-tokens-per-gpu": 65536,
    } | flags
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "slime.cli", "train", "--use-dynamic-batch-size", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    return {key: value for item in rows for key, value in item.items()}
