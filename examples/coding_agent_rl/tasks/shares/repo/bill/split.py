"""Bills in whole cents."""


def split(cents: int, people: int) -> list[int]:
    """What each of the people pays."""
    if people < 1:
        raise ValueError("nobody is there to pay")
    return [cents // people] * people
