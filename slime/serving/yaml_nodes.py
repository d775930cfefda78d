"""YAML with line numbers: nodes are taken apart step by step, and every complaint is kept with its place.

Invariant: reading goes on behind a complaint, so that all of them can be told together. Knows nothing of what
the file is about.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from slime.config.problem import Problem
from slime.errors import ConfigError


class YamlFile:
    """One file, its root node, and what is wrong with it.

    Attributes:
        problems: in the order in which they were found.
    """

    def __init__(self, path: Path) -> None:
        """Parse the file.

        Raises:
            ConfigError: it cannot be read, is not YAML, or is empty.
        """
        self.path = path
        self.problems: list[Problem] = []
        self._loader = yaml.SafeLoader("")
        try:
            root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except OSError as error:
            raise ConfigError(f"cannot read: {error.strerror}", place=str(path)) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"is not YAML: {error}", place=str(path)) from error
        if root is None:
            raise ConfigError("is empty", place=str(path))
        self.root: yaml.Node = root
        self._find_twins(root, set())

    def place(self, node: yaml.Node) -> str:
        """``file:line`` of a node."""
        return f"{self.path}:{node.start_mark.line + 1}"

    def complain(self, node: yaml.Node, message: str, remedy: str, *, warning: bool = False) -> None:
        """Keep a problem."""
        self.problems.append(Problem(self.place(node), message, remedy, warning))

    def value(self, node: yaml.Node) -> Any:
        """The plain value of a node."""
        return self._loader.construct_object(node, deep=True)

    def mapping(self, node: yaml.Node, what: str, known: Iterable[str] = ()) -> dict[str, yaml.Node]:
        """The nodes below a mapping by key; a key that is not `known` (where any are) is a problem.

        Anchors and ``<<`` are followed.
        """
        if not isinstance(node, yaml.MappingNode):
            self.complain(node, f"{what} must be a mapping", "write `key: value` lines")
            return {}
        self._loader.flatten_mapping(node)
        names = set(known)
        found: dict[str, yaml.Node] = {}
        for key, child in node.value:
            name = str(key.value)
            if names and name not in names:
                self.complain(key, f"unknown key {name!r} in {what}", nearest(name, names))
                continue
            found[name] = child
        return found

    def _find_twins(self, node: yaml.Node, seen: set[int]) -> None:
        """Complain of keys that stand twice in one mapping; to be done before merges are followed."""
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            return
        seen.add(id(node))
        names: set[str] = set()
        for item in node.value:
            if isinstance(item, tuple):
                name = str(item[0].value)
                if name in names:
                    self.complain(item[0], f"{name} is said twice", "keep one of them")
                names.add(name)
            self._find_twins(item[1] if isinstance(item, tuple) else item, seen)

    def sequence(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        """The nodes of a list."""
        if not isinstance(node, yaml.SequenceNode):
            self.complain(node, f"{what} must be a list", "write `- ` before each entry")
            return []
        return list(node.value)

    def text(self, node: yaml.Node, what: str) -> str | None:
        """A text that is not empty."""
        value = self.value(node)
        if isinstance(value, str) and value:
            return value
        self.complain(node, f"{what} must be a text, got {value!r}", "put it in quotes")
        return None

    def boolean(self, node: yaml.Node, what: str) -> bool | None:
        """True or false."""
        value = self.value(node)
        if isinstance(value, bool):
            return value
        self.complain(node, f"{what} must be true or false, got {value!r}", "write true or false")
        return None

    def count(self, node: yaml.Node, what: str) -> int | None:
        """A whole number above 0."""
        value = self.value(node)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.complain(node, f"{what} must be a whole number above 0, got {value!r}", "e.g. 1")
        return None


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for a name that is not known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def raise_problems(problems: Iterable[Problem], what: str) -> list[Problem]:
    """The warnings among `problems`.

    Raises:
        ConfigError: there is more than warnings; it tells all of them.
    """
    found = list(problems)
    errors = [problem for problem in found if not problem.warning]
    if errors:
        text = "\n".join(f"  {p.flag}: {p.message}\n    remedy: {p.remedy}" for p in errors)
        count = "one problem" if len(errors) == 1 else f"{len(errors)} problems"
        raise ConfigError(f"{what} cannot be run ({count})\n{text}")
    return found


def null_free(value: Mapping[str, yaml.Node], file: YamlFile) -> dict[str, yaml.Node]:
    """The same without keys whose value is null: they stand for their default."""
    return {name: node for name, node in value.items() if file.value(node) is not None}
