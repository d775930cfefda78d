"""Write the tasks as a data set: `train.jsonl`, and a git repository a task, which sandboxes start from.

    python -m examples.coding_agent_rl.make_data data/coding_agent

A row is what `generate` needs: the issue as the prompt, and in the metadata image, working directory, the
tests that must pass, and how they are run. The known solutions are not part of it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TASKS = HERE / "tasks"
WORKDIR = "/workspace"
COMMIT = ("-c", "user.name=maintainer", "-c", "user.email=maintainer@example.com", "commit", "--quiet")
PARSER = """import json, sys
lines = [line.split() for line in open(sys.argv[1])]
json.dump({"tests": [{"name": name, "status": status} for status, name in lines]}, open(sys.argv[3], "w"))
"""


def task_names() -> list[str]:
    """All tasks, in order."""
    return sorted(folder.name for folder in TASKS.iterdir())


def solution(name: str) -> str:
    """The patch that is known to repair a task: for checking the task, never shown to an agent."""
    return (TASKS / name / "solution.patch").read_text()


def make_repository(name: str, folder: Path) -> Path:
    """The task's repository with one commit, in `folder`; what was there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TASKS / name / "repo", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for command in (("init", "--quiet"), ("add", "--all"), (*COMMIT, "-m", "Import")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def run_script(tests: list[str]) -> str:
    """A shell script that runs the tests as the commit has them, whatever the agent made of them."""
    runner = (HERE / "run_tests.py").read_text()
    names = " ".join(map(shlex.quote, tests))
    return (
        f"git checkout --quiet HEAD -- tests || exit 126\npython3 -I - {names} <<'RUNNER'\n{runner}RUNNER\n"
    )


def row(name: str, image: Path) -> dict[str, Any]:
    """One prompt."""
    tests = json.loads((TASKS / name / "tests.json").read_text())
    metadata = {
        "instance_id": name,
        "image": str(image.resolve()),
        "workdir": WORKDIR,
        **tests,
        "run_script": run_script([*tests["FAIL_TO_PASS"], *tests["PASS_TO_PASS"]]),
        "parser": PARSER,
    }
    return {"input": (TASKS / name / "issue.md").read_text(), "metadata": metadata}


def make(folder: Path) -> Path:
    """Write everything below `folder`; returns the data file."""
    rows = [row(name, make_repository(name, folder / "repos" / name)) for name in task_names()]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return data


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    print(make(parser.parse_args().folder))


if __name__ == "__main__":
    main()
