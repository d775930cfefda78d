"""What a person sees while a run goes on: a live line and a step table on a terminal, or plain lines.

Knows metric names and how to print them; knows nothing of how they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", "step", "d"),
    ("reward", "rollout/raw_reward", ".3f"),
    ("length", "rollout/response_len/mean", ".1f"),
    ("cut", "rollout/truncated_ratio", ".2f"),
    ("loss", "train/loss", "+.4f"),
    ("grad", "train/grad_norm", ".3f"),
    ("gap", "train/train_rollout_logprob_abs_diff", ".1e"),
    ("policy", "rollout/policy_version", ".0f"),
    ("tok/s", "perf/tokens_per_gpu_per_sec", ".0f"),
    ("roll s", "perf/rollout_time", ".1f"),
    ("train s", "perf/train_time", ".1f"),
    ("sync s", "perf/update_weights_time", ".2f"),
    ("rollouts", "rollout/accounting", "s"),
)
"""Title, metric and format of the step table."""
ACCOUNTING = "rollout/accounting/"
FATES = ("trained", "filtered", "failed", "requeued", "in flight")


class RunConsole(Protocol):
    """Where a run tells what it does."""

    def note(self, text: str) -> None:
        """Say one thing."""
        ...

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins; `total` is the number of its units, where there is one."""
        ...

    def progress(self, done: int) -> None:
        """Units of the phase that are done."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""
        ...


class PlainConsole:
    """Lines that suit a log file."""

    def __init__(self) -> None:
        self._has_header = False

    def note(self, text: str) -> None:
        """Print the text."""
        print(text, flush=True)

    def phase(self, name: str, total: int | None = None) -> None:
        """Nothing: a log wants results."""

    def progress(self, done: int) -> None:
        """Nothing: a log wants results."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a row of the table, with a header before the first."""
        if not self._has_header:
            print(header(), flush=True)
            self._has_header = True
        print(row(step, metrics), flush=True)


class LiveConsole:
    """A live progress line below a growing table of steps."""

    def __init__(self) -> None:
        self._console = RichConsole()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._has_header = False

    def __enter__(self) -> LiveConsole:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Print above the live line."""
        self._console.print(text, highlight=False, markup=False)

    def phase(self, name: str, total: int | None = None) -> None:
        """Restart the live line for a phase."""
        self._bar.reset(self._task, description=name, total=total)

    def progress(self, done: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row to the table."""
        if not self._has_header:
            self._console.print(header(), style="bold", highlight=False)
            self._has_header = True
        self._console.print(row(step, metrics), highlight=False)


def header() -> str:
    """What the last column means, and the titles of the step table."""
    legend = "rollouts: carried + submitted = " + " + ".join(FATES)
    return legend + "\n" + " ".join(f"{title:>7}" for title, _, _ in COLUMNS)


def row(step: int, metrics: Mapping[str, float]) -> str:
    """One row of the step table."""
    return " ".join(f"{cell:>7}" for cell in cells(step, metrics))


def cells(step: int, metrics: Mapping[str, float]) -> list[str]:
    """One text a column; a metric that a step does not have shows as a dash."""
    values: dict[str, float | str] = {"step": step, **metrics}
    if ACCOUNTING + "submitted" in metrics:
        values["rollout/accounting"] = accounting(metrics)
    return [format(values[name], form) if name in values else "-" for _, name, form in COLUMNS]


def accounting(metrics: Mapping[str, float]) -> str:
    """The identity of law 5 in numbers, e.g. ``0+64=60+0+4+0+0``."""
    came = "+".join(f"{metrics.get(ACCOUNTING + name, 0):.0f}" for name in ("carried", "submitted"))
    fates = "+".join(f"{metrics.get(ACCOUNTING + fate.replace(' ', '_'), 0):.0f}" for fate in FATES)
    return f"{came}={fates}"


def is_terminal() -> bool:
    """Whether standard output is a terminal that can show a live line."""
    return RichConsole().is_terminal
