"""Installs SGLang and its router for CPU into ``.cache/sglang``: ``python -m tests.sglang.install``.

`PYTHON` is an interpreter with SGLang 0.5.23 and sglang-router, `OLDER_PYTHON` one with SGLang 0.5.15.post1
laid over the same environment. What is complete is left alone; what is not is removed and made anew. Every
package is pinned and installed without a resolver, torch as its build for CPU: no CUDA build can come.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
# Environments do not move: no link may stand in their path.
CACHE = (HERE.parents[1] / ".cache").resolve() / "sglang"
ENVIRONMENT = CACHE / "venv"
PYTHON = ENVIRONMENT / "bin" / "python"
OVERLAY = CACHE / "older"
OLDER_PYTHON = OVERLAY / "bin" / "python"
STAMP = ".installed"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main():
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / ".lock"):
        install_once(ENVIRONMENT, content_of("requirements.txt", "shims"), install_environment)
        install_once(OVERLAY, content_of("requirements.txt", "requirements-older.txt"), install_overlay)


def is_installed():
    """Whether both interpreters are there and complete."""
    return (ENVIRONMENT / STAMP).exists() and (OVERLAY / STAMP).exists()


def install_once(folder, wanted, install):
    """Call `install` unless the stamp in `folder` says that just this is there; remove what fails."""
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        install()
        stamp.write_text(wanted)
    finally:
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)


def install_environment():
    run(sys.executable, "-m", "venv", str(ENVIRONMENT))
    torch, *others = requirements("requirements.txt")
    # Only CPU builds have a local version; where no index that pip knows has it, PyTorch's own does.
    if not run_pip(torch, check=False):
        run_pip("--index-url", CPU_INDEX, torch)
    run_pip(*others)
    packages = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    shutil.copytree(
        HERE / "shims", packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    run(
        str(PYTHON),
        "-c",
        "import sglang.srt.server_args, sglang_router, torch; assert not torch.version.cuda",
    )


def install_overlay():
    packages = OVERLAY / "packages"
    run_pip("--target", str(packages), *requirements("requirements-older.txt"))
    OLDER_PYTHON.parent.mkdir()
    OLDER_PYTHON.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{PYTHON}" "$@"\n')
    OLDER_PYTHON.chmod(0o755)
    run(str(OLDER_PYTHON), "-c", "import sglang.srt.server_args")


def requirements(name):
    return (HERE / name).read_text().split()


def content_of(*names):
    """A digest of files and folders beside this one."""
    digest = hashlib.sha256()
    for name in names:
        path = HERE / name
        for file in sorted(path.rglob("*.p*")) if path.is_dir() else [path]:
            if file.suffix != ".pyc" and file.is_file():
                digest.update(file.read_bytes())
    return digest.hexdigest()


def run_pip(*words, check=True):
    """Install with the environment's pip, exactly what is named; whether that went well."""
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    return run(*pip, *words, check=check)


def run(*command, check=True):
    print("+", *command, flush=True)
    # Conflicts that pip tells of are those that the pins and the shims resolve.
    return subprocess.run(command, check=check, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode == 0


@contextmanager
def locked(path):
    """One installation at a time, whoever else shares the folder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
