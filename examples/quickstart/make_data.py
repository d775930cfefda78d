"""Write additions as prompts: `train.jsonl`, and `held_out.jsonl` with pairs that training never sees."""

import argparse
import json
import random
from pathlib import Path


def rows(largest: int, held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Rows for training and for evaluation; `held_out` pairs of summands go to evaluation in both orders."""
    pairs = [(a, b) for a in range(largest + 1) for b in range(a, largest + 1)]
    random.Random(seed).shuffle(pairs)
    return both_orders(pairs[held_out:]), both_orders(pairs[:held_out])


def both_orders(pairs: list[tuple[int, int]]) -> list[dict]:
    """A row for a + b and, where it differs, one for b + a."""
    ordered = dict.fromkeys(order for a, b in pairs for order in ((a, b), (b, a)))
    return [row(a, b) for a, b in ordered]


def row(a: int, b: int) -> dict:
    """One prompt with its answer; the example in it shows what just the number means."""
    messages = [
        {"role": "system", "content": "Answer with just the number."},
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]
    return {"input": messages, "label": str(a + b)}


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--largest", type=int, default=9, help="largest summand [9]")
    parser.add_argument("--held-out", type=int, default=16, help="pairs kept for evaluation [16]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    train, held_out = rows(options.largest, options.held_out, options.seed)
    for name, part in (("train", train), ("held_out", held_out)):
        text = "".join(json.dumps(item) + "\n" for item in part)
        (options.folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
