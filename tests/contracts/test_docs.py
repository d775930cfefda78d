"""The page of hooks tells every flag and every contract of generate hooks."""

from pathlib import Path

from slime.contracts import CONTRACTS
from slime.rollout.hooks import flag_name

PAGE = (Path(__file__).parents[2] / "docs/en/contracts.md").read_text(encoding="utf-8")


def test_every_hook_with_contracts_is_in_the_table():
    checked = [dest for dest, contracts in CONTRACTS.items() if len(contracts) > 1]
    assert [dest for dest in checked if f"`{flag_name(dest)}`" not in PAGE] == []


def test_the_example_of_a_test_runs(monkeypatch, tmp_path):
    code = PAGE.split("```python\n")[1].split("```")[0]
    (tmp_path / "train.jsonl").write_text('{"input": "What is 6 times 7?"}\n')
    monkeypatch.chdir(tmp_path)
    space = {}
    exec(code.replace("my.module.generate", "slime.rollout.sglang_rollout.generate"), space)
    space["test_my_hook_keeps_its_contracts"]()
