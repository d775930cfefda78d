"""A stand-in for an agent's program: it notes how it was called, and answers what its harness expects."""

import json

import pytest

from tests.agent.harness.processes import ProcessSandbox

PROGRAM = """#!/bin/bash
here="$(dirname "$0")"
printf '%s\\n' "$@" > "$here/arguments"
env -0 > "$here/environment"
cat > "$here/prompt"
pwd > "$here/cwd"
echo '{"type": "started"}'
echo 'a complaint' >&2
eval "$PROGRAM_DOES"
"""


class Programs:
    """A folder on the sandbox's PATH.

    Attributes:
        sandbox: what the harness is given.
    """

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.sandbox = ProcessSandbox({"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)})

    def add(self, name, text=PROGRAM):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def noted(self, what):
        return (self.folder / what).read_text()

    @property
    def environment(self):
        lines = self.noted("environment").split("\0")
        return dict(line.split("=", 1) for line in lines if line)


@pytest.fixture
def programs(tmp_path):
    return Programs(tmp_path / "programs")


@pytest.fixture
def workdir(tmp_path):
    folder = tmp_path / "it's a repository"
    folder.mkdir()
    return folder


@pytest.fixture
def log_of(workdir):
    """The agent's log as a list of objects."""

    def read():
        lines = (workdir / ".harness" / "trajectory.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return read
