"""The diff of a box's workspace, from its overlay or its copy: what git would say, applied by git."""

import asyncio

import pytest

from slime.agent.sandbox import LocalSandbox, SandboxUnavailableError
from slime.agent.sandbox.backends import choose
from tests.agent.sandbox.test_patch import apply, tree

CHANGES = """
set -e
echo more >> a.txt; rm gone; chmod +x mode; rm -r folder; mkdir folder; echo new > folder/new
mv moved other; printf '\\0\\1' > bin; ln -s a.txt link; mkdir -p d/e; echo deep > d/e/f
rm again; echo again > again; rm -r whole; echo file > whole; chmod 000 d/e/f; echo x > .git/x
"""


@pytest.fixture(params=["namespaces", "plain"])
def backend(request):
    try:
        asyncio.run(choose(request.param))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return request.param


def test_the_diff_of_a_box_turns_its_image_into_its_workspace(backend, tmp_path):
    image = tmp_path / "image"
    for name in ("folder/old", "moved/m", "whole/w", ".git/config"):
        (image / name).parent.mkdir(parents=True, exist_ok=True)
        (image / name).write_text(name)
    for name in ("a.txt", "gone", "mode", "again", "kept"):
        (image / name).write_text(f"{name}\n")

    async def scenario():
        async with LocalSandbox(image, require=backend) as sb:
            assert await sb.diff() == ""
            await sb.exec(CHANGES, check=True)
            return await sb.diff()

    patch = asyncio.run(scenario())
    assert ".git/" not in patch.replace("diff --git", "")
    assert "kept" not in patch
    apply(image, patch)
    after = {name: content for name, content in tree(image).items() if not name.startswith(".git")}
    assert after == {
        "a.txt": ("-", b"a.txt\nmore\n"),
        "again": ("-", b"again\n"),
        "bin": ("-", b"\0\1"),
        "d/e/f": ("-", b"deep\n"),
        "folder/new": ("-", b"new\n"),
        "kept": ("-", b"kept\n"),
        "link": ("link", "a.txt"),
        "mode": ("x", b"mode\n"),
        "other/m": ("-", b"moved/m"),
        "whole": ("-", b"file\n"),
    }
