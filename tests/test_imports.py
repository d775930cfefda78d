"""Law 9: heavy libraries are imported where they are used, and nothing runs at import."""

import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import slime

HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "e2b", "wandb", "aiohttp", "sympy", "pyarrow")
LIGHT = (
    "slime",
    "slime.errors",
    "slime.config",
    "slime.agent",
    "slime.rollout",
    "slime.utils",
    "slime.train.batch",
)
CHECK = """
import sys, threading
for name in sys.argv[1].split(","):
    __import__(name)
print(",".join(name for name in sys.argv[2].split(",") if name in sys.modules))
print(threading.active_count())
"""


def modules_below(name):
    """The package and all its modules, found without importing them."""
    spec = importlib.util.find_spec(name)
    found = [name]
    for module in pkgutil.iter_modules(spec.submodule_search_locations or []):
        found += modules_below(f"{name}.{module.name}")
    return found


def exists(name):
    return importlib.util.find_spec(name) is not None


def loaded_heavy(names):
    command = [sys.executable, "-c", CHECK, ",".join(names), ",".join(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy, threads = done.stdout.splitlines()
    return [name for name in heavy.split(",") if name], int(threads)


@pytest.mark.parametrize("package", [name for name in LIGHT if exists(name)])
def test_package_and_all_below_import_without_heavy_libraries(package):
    names = [package] if package == "slime" else modules_below(package)
    heavy, threads = loaded_heavy(names)
    assert [name for name in heavy if (package, name) != ("slime.agent", "aiohttp")] == []
    assert threads == 1


def test_version_is_the_only_thing_at_the_top():
    assert slime.__version__
