"""slime's arithmetic against TRL 1.16 and verl 0.9.1 on the same tensors.

    python benchmarks/arithmetic.py [--peers .cache/arithmetic] [--document docs/en/arithmetic.md]

The peers' functions are called as they are, from packages that the script installs with ``--no-deps`` into a
folder of their own where they are missing. Where the definitions agree the results must, to 1e-6 of the
largest value (losses: value and gradient); where they do not, the table says why. With `--document` the
tables of that file are written anew; without it they are printed. Exit status 1: a row is not as it is said.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ["trl==1.16.0", "verl==0.9.1", "tensordict", "pyvers", "omegaconf", "antlr4-python3-runtime==4.9.3"]
PEERS += ["cloudpickle", "codetiming"]
TOLERANCE = 1e-6
BEGIN, END = "<!-- benchmarks/arithmetic.py: begin -->", "<!-- end -->"


def install(folder):
    """The peers, without what they depend on, below `folder`."""
    if not all((folder / name).is_dir() for name in ("trl", "verl", "tensordict", "omegaconf")):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, *PEERS], check=True)
    sys.path[:0] = [str(folder), str(ROOT)]


def gap(ours, theirs):
    """Largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compare(library, rows):
    """Measured rows: (library, what, our name, their name, difference, why)."""
    return [
        (library, row.what, row.name, row.function.__qualname__, gap(row.ours(), row.theirs()), row.why)
        for row in rows
    ]


def tables(found):
    """The two tables of the document."""
    same = ["| | slime | peer | largest difference |", "|---|---|---|---|"]
    other = ["| | slime | peer | difference | why |", "|---|---|---|---|---|"]
    for library, what, ours, theirs, size, why in found:
        if why is None:
            same.append(f"| {what} | `{ours}` | {library} `{theirs}` | {_shown(size)} |")
        else:
            other.append(f"| {what} | `{ours}` | {library} `{theirs}` | {size:.2g} | {why} |")
    return "\n".join(["### Equal", "", *same, "", "### Different", "", *other])


def _shown(size):
    """Rounding depends on the machine, so what is far below the tolerance has no digits."""
    return "below 1e-12" if size < 1e-12 else "below 1e-6" if size < TOLERANCE else f"{size:.1e}"


def write(document, text):
    """Put the tables between the marks of the document."""
    before, _, rest = document.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main():
    """Entry of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, default=ROOT / ".cache/arithmetic")
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    install(options.peers)
    import arithmetic_trl
    import arithmetic_verl

    found = [
        row
        for library, peer in (("verl", arithmetic_verl), ("TRL", arithmetic_trl))
        for row in compare(library, [*peer.equal(), *peer.different()])
    ]
    text = tables(found)
    write(options.document, text) if options.document else print(text)
    wrong = [row for row in found if (row[4] <= TOLERANCE) != (row[5] is None)]
    for library, what, *_, size, why in wrong:
        print(
            f"not as said: {library}, {what}: {size:.1e}{'' if why is None else f' ({why})'}", file=sys.stderr
        )
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
