"""CPU seconds that importing slime's light packages takes, each in a fresh interpreter.

    python benchmarks/imports.py [repeats]

Prints the median above a bare interpreter's start. The law's bound for `import slime` is 0.2 s.
"""

import resource
import statistics
import subprocess
import sys

PACKAGES = (
    "slime",
    "slime.utils.types",
    "slime.utils.data",
    "slime.rollout.data_source",
    "slime.rollout.rm_hub",
)


def cpu_seconds(code):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def median_cpu_seconds(code, repeats):
    return statistics.median(cpu_seconds(code) for _ in range(repeats))


def main():
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    bare = median_cpu_seconds("pass", repeats)
    for package in PACKAGES:
        seconds = median_cpu_seconds(f"import {package}", repeats) - bare
        print(f"import {package:28} {seconds:6.3f} s")


if __name__ == "__main__":
    main()
