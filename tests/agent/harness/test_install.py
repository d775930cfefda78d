"""Programs get into a sandbox from a registry or a tarball, and what does not is said."""

import asyncio
import io
import tarfile

import pytest

from slime.agent.harness import (
    CLAUDE_CODE,
    MINI_SWE_AGENT,
    HarnessError,
    install,
    install_node,
    install_npm_cli,
)

NODE = '#!/bin/bash\necho "v20.1.0"\n'
NPM = """#!/bin/bash
here="$(dirname "$0")"
echo "$@" >> "$here/npm-calls"
[ "$(wc -l < "$here/npm-calls")" -le "${FAILURES:-0}" ] && { echo "registry is down" >&2; exit 1; }
prefix="$4"
mkdir -p "$prefix/bin"
printf '#!/bin/bash\\necho "%s"\\n' "${INSTALLS:-1.2.3 (Agent)}" > "$prefix/bin/agent"
chmod +x "$prefix/bin/agent"
"""


@pytest.fixture
def prefix(tmp_path):
    return tmp_path / "prefix"


@pytest.fixture
def npm(programs, monkeypatch):
    monkeypatch.setattr(install, "BACKOFF_SEC", 0.01)
    programs.add("npm", NPM)
    programs.add("node", NODE)
    return programs


def install_agent(programs, prefix, **options):
    options = {"version": "1.2.3", "prefix": str(prefix), **options}
    asyncio.run(install_npm_cli(programs.sandbox, "@vendor/agent", "agent", **options))


def calls(programs):
    return programs.noted("npm-calls").splitlines()


def archive(path, files):
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text.encode()), 0o755
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_the_version_is_always_asked_for_by_name(npm, prefix):
    install_agent(npm, prefix)
    assert len(calls(npm)) == 1
    assert calls(npm)[0].startswith(f"install -g --prefix {prefix} ")
    assert calls(npm)[0].endswith("@vendor/agent@1.2.3")


def test_a_registry_that_fails_twice_is_asked_again(npm, prefix):
    npm.sandbox.env["FAILURES"] = "2"
    install_agent(npm, prefix)
    assert len(calls(npm)) == 3


def test_a_registry_that_fails_on_is_an_error_that_says_what_it_said(npm, prefix):
    npm.sandbox.env["FAILURES"] = "9"
    with pytest.raises(HarnessError, match=r"(?s)failed 3 times: registry is down.*TARBALL"):
        install_agent(npm, prefix)


def test_a_version_that_is_there_is_left_alone(npm, prefix):
    npm.add("agent", "#!/bin/bash\necho agent 1.2.3\n")
    install_agent(npm, prefix)
    assert not (npm.folder / "npm-calls").exists()


def test_another_version_is_replaced(npm, prefix):
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "agent").write_text("#!/bin/bash\necho 1.2.30\n")
    (prefix / "bin" / "agent").chmod(0o755)
    install_agent(npm, prefix)
    assert len(calls(npm)) == 1


def test_another_version_that_stays_first_on_the_path_is_an_error(npm, prefix):
    npm.add("agent", "#!/bin/bash\necho 0.9.0\n")
    with pytest.raises(HarnessError, match=r"1\.2\.3 was installed, but 'agent --version' says 0\.9\.0"):
        install_agent(npm, prefix)


def test_latest_is_installed_whatever_is_there(npm, prefix):
    npm.add("agent", "#!/bin/bash\necho 0.9.0\n")
    install_agent(npm, prefix, version="latest")
    assert calls(npm)[0].endswith("@vendor/agent@latest")


def test_what_npm_packed_is_given_to_npm(npm, prefix, tmp_path):
    packed = archive(tmp_path / "agent.tgz", {"package/package.json": "{}"})
    install_agent(npm, prefix, tarball=packed)
    assert calls(npm)[0].endswith(".tar")


def test_an_archive_of_a_prefix_needs_neither_npm_nor_node(programs, prefix, tmp_path):
    packed = archive(tmp_path / "agent.tar.gz", {"bin/agent": "#!/bin/bash\necho 5.0\n"})
    install_agent(programs, prefix, tarball=packed)
    assert (prefix / "bin" / "agent").exists()


def test_a_tarball_that_is_not_there_is_an_error(npm, prefix, tmp_path):
    with pytest.raises(HarnessError, match="no such tarball"):
        install_agent(npm, prefix, tarball=tmp_path / "none.tgz")


def test_an_old_node_is_replaced_from_the_tarball(programs, prefix, tmp_path, monkeypatch):
    programs.add("node", NODE)
    newer = archive(
        tmp_path / "node.tar.xz", {"node-v22.5.0-linux-x64/bin/node": "#!/bin/bash\necho v22.5.0\n"}
    )
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(newer))
    asyncio.run(install_node(programs.sandbox, 22, prefix=str(prefix)))
    assert (prefix / "bin" / "node").exists()


def test_a_node_that_is_new_enough_is_left_alone(programs, prefix):
    programs.add("node", NODE)
    asyncio.run(install_node(programs.sandbox, 20, prefix=str(prefix)))
    assert not prefix.exists()


def test_no_way_to_a_node_names_the_variable(npm, prefix, monkeypatch):
    monkeypatch.delenv("SLIME_AGENT_NODE_TARBALL", raising=False)
    npm.add("node", "#!/bin/bash\nexit 1\n")
    with pytest.raises(HarnessError, match="(?s)Node 22 is needed, none found.*SLIME_AGENT_NODE_TARBALL"):
        asyncio.run(install_node(npm.sandbox, 22, prefix=str(prefix)))


@pytest.mark.parametrize(
    ("harness", "said"), [(CLAUDE_CODE, "2.1.332 (Claude Code)"), (MINI_SWE_AGENT, "version 2.4.6.")]
)
def test_a_harness_finds_its_own_version(programs, harness, said):
    program = "claude" if harness is CLAUDE_CODE else "mini"
    programs.add(program, f"#!/bin/bash\necho '{said}'\n")
    asyncio.run(harness.install_cli(programs.sandbox))
    assert len(programs.sandbox.commands) == 1
