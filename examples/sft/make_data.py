"""Write the quickstart's additions as conversations to imitate: `train.jsonl`, and its `held_out.jsonl`.

The answer that the prompt itself shows as an example is not trained; the last one is.
"""

import argparse
import json
from pathlib import Path

from examples.quickstart.make_data import rows


def conversation(row: dict) -> dict:
    """A row of the quickstart with its answer as the last message."""
    shown = [
        message | {"step_loss_mask": 0} if message["role"] == "assistant" else message
        for message in row["input"]
    ]
    return {"messages": [*shown, {"role": "assistant", "content": row["label"]}]}


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
    for name, part in (("train", [conversation(row) for row in train]), ("held_out", held_out)):
        text = "".join(json.dumps(item) + "\n" for item in part)
        (options.folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
