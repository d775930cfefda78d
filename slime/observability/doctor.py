"""What every process of a run does right now, asked for and answered through files in its run folder.

A process that answers has a thread for it, which works while user code blocks everything else; one that does
not answer in time is itself the finding. Invariant: asking changes nothing in the run. Works over any file
system that the processes share.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from slime.errors import DataError

FOLDER = "doctor"
NAME_VARIABLE, FOLDER_VARIABLE = "SLIME_PROCESS_NAME", "SLIME_DOCTOR_FOLDER"
logger = logging.getLogger(__name__)
POLL_SECONDS = 0.25
_WAITING = ("/threading.py", "/queue.py", "/ray/_private/worker.py")
ANSWER_SECONDS = 10.0
"""How long an answer may take: law 6."""


class Patient:
    """The thread of one process that answers.

    Args:
        folder: where questions and answers are.
        name: of the process.
        describe: what is in flight here, for a person; called on the thread.
    """

    def __init__(self, folder: Path, name: str, describe: Callable[[], str]) -> None:
        self._folder, self._name, self._describe = folder, name, describe
        self._stop = threading.Event()
        self._answered = ""
        folder.mkdir(parents=True, exist_ok=True)
        told = {"name": name, "pid": os.getpid(), "host": socket.gethostname()}
        _write(folder / f"{_file_name(name)}.json", json.dumps(told))
        self._thread = threading.Thread(target=self._serve, name="slime-doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the process is not asked any more."""
        self._stop.set()
        self._thread.join()
        (self._folder / f"{_file_name(self._name)}.json").unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            question = _read(self._folder / "question")
            if question and question != self._answered:
                self._answered = question
                answer = f"{question}\n{self._describe()}\n{_threads()}"
                try:
                    _write(self._folder / f"{_file_name(self._name)}.txt", answer)
                except OSError as error:
                    logger.error("the question of slime doctor cannot be answered: %s", error)


def patient_of_environment(describe: Callable[[], str]) -> Patient | None:
    """The thread of an actor, which its maker named; None outside of a run."""
    folder, name = os.environ.get(FOLDER_VARIABLE), os.environ.get(NAME_VARIABLE)
    return Patient(Path(folder), name, describe) if folder and name else None


def environment_of(run_dir: Path, name: str) -> dict[str, str]:
    """What an actor needs to be asked."""
    return {FOLDER_VARIABLE: str((run_dir / FOLDER).resolve()), NAME_VARIABLE: name}


def examine(run_dir: Path, seconds: float = ANSWER_SECONDS) -> str:
    """Ask every process of a run; returns what they say, or that they do not answer.

    Raises:
        DataError: no run has ever begun in this folder.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir():
        raise DataError(
            "holds no run that can be asked", place=str(run_dir), remedy="name the --run-dir of a run"
        )
    patients = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not patients:
        return "the run has ended"
    question = uuid.uuid4().hex
    _write(folder / "question", question)
    return "\n\n".join(_examined(folder, told, question, time.monotonic() + seconds) for told in patients)


@contextmanager
def answering_signal(run_dir: Path) -> Iterator[None]:
    """On SIGUSR1, print what `examine` finds to standard error, while the run goes on."""

    def print_it() -> None:
        print(examine(run_dir), file=sys.stderr, flush=True)

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=print_it, name="slime-examine", daemon=True).start()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _examined(folder: Path, told: dict[str, object], question: str, deadline: float) -> str:
    title = f"== {told['name']} (process {told['pid']} on {told['host']})"
    path = folder / f"{_file_name(str(told['name']))}.txt"
    while time.monotonic() < deadline:
        first, _, rest = _read(path).partition("\n")
        if first == question:
            return f"{title}\n{rest}"
        if _is_gone(told):
            return f"{title}\nis gone: it ended without a word"
        time.sleep(0.05)
    return f"{title}\ndoes not answer: it is stopped, or something in it holds the interpreter"


def _is_gone(told: dict[str, object]) -> bool:
    if told["host"] != socket.gethostname():
        return False
    try:
        os.kill(int(str(told["pid"])), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _threads() -> str:
    """The innermost frame of every thread that does not just wait in a library for its next work."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        last = traceback.extract_stack(frame, limit=1)[-1]
        if last.filename.endswith(_WAITING):
            continue
        lines.append(f"  thread {names.get(ident, ident)}: {last.filename}:{last.lineno} in {last.name}")
    return "\n".join(lines)


def _file_name(name: str) -> str:
    return name.replace("/", "_").replace(" ", "_")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
