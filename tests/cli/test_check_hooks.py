"""`slime check my.module:generate`: what it prints and how it ends."""

import json
import subprocess
import sys

from slime.cli import main

GOOD = "slime.rollout.sglang_rollout:generate"
REWARD = "examples.quickstart.reward:just_the_number"


def check(capsys, *flags):
    code = main(["check", *flags])
    return code, capsys.readouterr()


def test_good_hooks_pass(capsys):
    code, printed = check(capsys, GOOD, "--reward", REWARD)
    assert code == 0
    assert "--custom-generate-function-path slime.rollout.sglang_rollout:generate" in printed.out
    assert printed.out.rstrip().endswith("0 failed, 5 not applicable")


def test_a_failure_says_law_and_remedy_and_ends_with_1(capsys):
    code, printed = check(capsys, "tests.contracts.broken_generate:trains_each_token_once")
    assert code == 1
    assert "trains each token once: expected mask 1 in one row only; found token" in printed.out
    assert "law: A sampled token trains in one row (law 1)" in printed.out
    assert "mend: set loss_mask 0 for what another sibling trains already" in printed.out


def test_json_holds_every_finding(capsys):
    code, printed = check(capsys, "--custom-rm-path", "tests.contracts.broken_hooks.reward_nan", "--json")
    found = {item["contract"]: item for item in json.loads(printed.out)}
    assert code == 1
    assert found["gives a number"]["verdict"] == "failed"
    assert found["judges many at once"]["verdict"] == "not applicable"
    assert found["takes the call"]["hook"] == "--custom-rm-path tests.contracts.broken_hooks.reward_nan"


def test_prompts_model_and_flags_of_the_user_are_used(capsys, tmp_path):
    data = tmp_path / "mine.jsonl"
    data.write_text('{"input": "a prompt of mine", "label": "1", "metadata": {"tool": "lookup"}}\n')
    hook = "tests.contracts.good_generate:needs_metadata"
    assert check(capsys, hook)[0] == 1
    flags = ("--prompt-data", str(data), "--rollout-max-response-len", "7")
    code, printed = check(capsys, hook, *flags, "--json")
    assert code == 0, printed.out
    (note,) = [
        item["message"]
        for item in json.loads(printed.out)
        if item["contract"] == "trains only sampled tokens"
    ]
    assert note == "7 of 7 sampled tokens train"


def test_a_script_of_the_user_plays_the_model(capsys):
    code, printed = check(
        capsys,
        "tests.contracts.good_generate:calls_a_tool",
        "--script",
        "tests.contracts.good_generate:tool_script",
        "--json",
    )
    verdicts = {item["contract"]: item["verdict"] for item in json.loads(printed.out)}
    assert code == 0, printed.out
    assert verdicts["fails with a later turn"] == "passed"


def test_nothing_to_check_and_unknown_flags_are_refused(capsys):
    code, printed = check(capsys)
    assert code == 2 and "says nothing to check" in printed.err
    code, printed = check(capsys, GOOD, "--custom-rm-pat", "x")
    assert code == 2 and "did you mean" in printed.err


def test_a_hook_that_blocks_the_loop_for_ever_does_not_hold_the_check():
    command = [sys.executable, "-m", "slime.cli", "check", "tests.contracts.broken_generate:blocks_for_ever"]
    done = subprocess.run([*command, "--seconds", "0.2"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert (
        "stood still" in done.stdout
        and "broken_generate.py" in done.stdout
        and "blocks_for_ever" in done.stdout
    )
