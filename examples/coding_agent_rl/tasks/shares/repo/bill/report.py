"""Bills as text."""

from bill.split import split


def euros(cents: int) -> str:
    """An amount with two decimals."""
    return f"{cents / 100:.2f}"


def report(cents: int, names: list[str]) -> str:
    """One line a person."""
    shares = split(cents, len(names))
    return "\n".join(f"{name}: {euros(share)}" for name, share in zip(names, shares, strict=True))
