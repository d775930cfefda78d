"""Runs the unittest tests that the command line names, from the current directory; one line for each.

Each runs in a process of its own that tells its verdict through a pipe, so that code which ends the process,
hangs, or prints what it likes makes its test fail, and nothing else. It is sent to the sandbox as text.
"""

import os
import subprocess
import sys

SECONDS = 20
CHILD = """
import os, sys, unittest
report, name = int(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[:1]
sys.path.insert(0, os.getcwd())
result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromName(name).run(result)
print(*(text for _, text in result.errors + result.failures), sep="", end="", file=sys.stderr)
os.write(report, b"PASSED" if result.testsRun and result.wasSuccessful() else b"FAILED")
"""


def verdict(name: str) -> str:
    """PASSED, or FAILED, also where the test gave no verdict."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    command = [sys.executable, "-I", "-B", "-c", CHILD, str(writer), name]
    try:
        subprocess.run(command, pass_fds=[writer], stdout=2, timeout=SECONDS)
        return os.read(reader, 16).decode() or "FAILED"
    except (subprocess.TimeoutExpired, BlockingIOError):
        return "FAILED"
    finally:
        os.close(reader)
        os.close(writer)


for test in sys.argv[1:]:
    print(verdict(test), test, flush=True)
