"""The console script `slime`: one verb a module, loaded when it is called.

Owns: the list of verbs, and how an error ends the process (message without a traceback, exit code 2).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from slime.errors import SlimeError

VERBS = {
    "train": "train a model with reinforcement learning",
    "check": "check a configuration and its hooks without a run",
    "eval": "evaluate a model behind an engine, resumably",
    "rollout": "make rollouts with an engine and write them down, resumably",
    "serve": "serve a model with the embedded engine, or a topology of models",
    "convert": "turn a GGUF file into a Hugging Face folder, or a folder into FP8 or INT4 and back",
    "simulate": "choose how rollouts and training overlap, in virtual time",
    "replay": "decide the batches of a run again from its event log",
    "doctor": "what every process of a run is doing, and since when",
    "rescore": "score stored rollouts again, with another reward or the same",
    "view": "look at a run: its metrics and its rollouts",
}


def main(argv: list[str] | None = None) -> int:
    """Dispatch to the verb's `main(argv)`; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] not in VERBS:
        print(f"slime: unknown verb {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # hooks are found from where the user stands
    verb = importlib.import_module(f"slime.cli.{words[0]}")
    try:
        code: int = verb.main(words[1:])
    except SlimeError as error:
        if os.environ.get("SLIME_TRACEBACK"):
            traceback.print_exc()
        print(f"slime {words[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return code


def _usage() -> str:
    rows = "\n".join(f"  {verb:<9} {text}" for verb, text in VERBS.items())
    return f"usage: slime VERB [flags]\n\n{rows}\n\n`slime VERB --help` tells a verb's flags."
