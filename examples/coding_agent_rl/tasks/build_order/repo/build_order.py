"""In which order to build targets that need each other."""


class CycleError(ValueError):
    """Targets wait for each other."""


def order(needs: dict[str, list[str]]) -> list[str]:
    """Every target after those that it needs; by name where there is a choice."""
    targets = set(needs) | {need for wanted in needs.values() for need in wanted}
    waits = {target: set(needs.get(target, [])) for target in targets}
    done: list[str] = []
    while ready := sorted(target for target, wanted in waits.items() if not wanted):
        for target in ready:
            del waits[target]
            done.append(target)
        for wanted in waits.values():
            wanted.difference_update(ready)
    return done
