"""Write additions as prompts: `train.jsonl`, and `held_out.jsonl` with sums that training never sees."""

import argparse
import json
import random
from pathlib import Path


def rows(largest: int, held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """All pairs 0..largest in random order, split; each row has `input` (chat messages) and `label`."""
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    random.Random(seed).shuffle(pairs)
    made = [row(a, b) for a, b in pairs]
    return made[held_out:], made[:held_out]


def row(a: int, b: int) -> dict:
    """One prompt with its answer."""
    messages = [
        {"role": "system", "content": "Answer with just the number."},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]
    return {"input": messages, "label": str(a + b)}


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--largest", type=int, default=9, help="largest summand [9]")
    parser.add_argument("--held-out", type=int, default=32, help="sums kept for evaluation [32]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    train, held_out = rows(options.largest, options.held_out, options.seed)
    for name, part in (("train", train), ("held_out", held_out)):
        text = "".join(json.dumps(item) + "\n" for item in part)
        (options.folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
