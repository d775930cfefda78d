"""Reads a `--sglang-config` file into a `Topology`.

Invariant: every problem of the file is told, with its line, before any process starts; a topology comes out
only if there is none. Knows the shape of the file; what an engine's settings are is asked of `OverrideRules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from slime.config.problem import Problem
from slime.serving.overrides import OverrideRules
from slime.serving.topology import GROUP_TYPES, GroupType, ServedModel, ServerGroup, Topology, same_folder
from slime.serving.topology_checks import check_topology
from slime.serving.yaml_nodes import YamlFile, null_free, raise_problems

_MODEL_KEYS = (
    "name",
    "model_path",
    "update_weights",
    "num_gpus_per_engine",
    "server_groups",
    "engine_groups",
)
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the flags say beside the file.

    Attributes:
        model_path: the folder that is trained, and served where a model names none (--hf-checkpoint).
        num_gpus: --rollout-num-gpus, where it is given; the groups must add up to it.
        trains: whether a trainer sends weights.
    """

    model_path: str | None
    rules: OverrideRules
    num_gpus: int | None = None
    num_gpus_per_engine: int = 1
    trains: bool = True


@dataclass
class _Entry:
    """A model as the file says it."""

    node: yaml.Node
    name: str
    keys: Mapping[str, yaml.Node]
    groups: list[ServerGroup] = field(default_factory=list)
    paths: list[tuple[yaml.Node, str]] = field(default_factory=list)


def read_topology(path: str | Path, given: Given) -> tuple[Topology, list[Problem]]:
    """The topology of a file, and warnings.

    Raises:
        ConfigError: with every problem of the file.
    """
    file = YamlFile(Path(path))
    models = []
    for node in _model_nodes(file):
        model = _Reader(file, given).model(node)
        if model is not None:
            models.append(model)
    topology = Topology(models=tuple(models))
    if models:
        counted = (given.num_gpus, str(path))
        file.problems += check_topology(topology, trains=given.trains, counted=counted)
    return topology, raise_problems(file.problems, f"the topology {path}")


def _model_nodes(file: YamlFile) -> list[yaml.Node]:
    root = file.mapping(file.root, "the file", ("sglang",))
    if "sglang" not in root:
        file.complain(file.root, "has no `sglang`", "a list of models below `sglang:`")
        return []
    nodes = file.sequence(root["sglang"], "sglang")
    if not nodes:
        file.complain(root["sglang"], "sglang names no model", "at least one entry with `name`")
    return nodes


class _Reader:
    """Reads one model."""

    def __init__(self, file: YamlFile, given: Given) -> None:
        self._file = file
        self._given = given

    def model(self, node: yaml.Node) -> ServedModel | None:
        """The model, or None where it lacks what it needs; problems are in the file."""
        file = self._file
        keys = null_free(file.mapping(node, "a model", _MODEL_KEYS), file)
        if not keys:
            return None
        entry = _Entry(node, self._name(node, keys), keys)
        self._groups(entry)
        model_path = self._model_path(entry)
        return ServedModel(
            name=entry.name,
            model_path=model_path,
            update_weights=self._update_weights(entry, model_path),
            groups=tuple(entry.groups),
            place=file.place(node),
        )

    def _name(self, node: yaml.Node, keys: Mapping[str, yaml.Node]) -> str:
        if "name" not in keys:
            self._file.complain(node, "a model needs `name`", "hooks ask for the model by it")
            return f"model-{node.start_mark.line + 1}"
        name = self._file.text(keys["name"], "name") or "?"
        if not _NAME.fullmatch(name):
            self._file.complain(keys["name"], f"{name!r} is no name", "letters, digits, and . _ - between")
        return name

    def _groups(self, entry: _Entry) -> None:
        keys, file = entry.keys, self._file
        if "server_groups" in keys and "engine_groups" in keys:
            file.complain(keys["engine_groups"], "is the same as server_groups", "keep server_groups")
        node = keys.get("server_groups") or keys.get("engine_groups")
        if node is None:
            file.complain(entry.node, f"{entry.name} has no server_groups", "[] starts its router only")
            return
        for child in file.sequence(node, "server_groups"):
            group = self._group(entry, child)
            if group is not None:
                entry.groups.append(group)

    def _group(self, entry: _Entry, node: yaml.Node) -> ServerGroup | None:
        file = self._file
        keys = null_free(file.mapping(node, "a server group", _GROUP_KEYS), file)
        for name in ("worker_type", "num_gpus"):
            if name not in keys:
                file.complain(node, f"a server group needs `{name}`", f"worker_type: {'|'.join(GROUP_TYPES)}")
        if "worker_type" not in keys or "num_gpus" not in keys:
            return None
        kind, gpus = self._kind(keys["worker_type"]), file.count(keys["num_gpus"], "num_gpus")
        size = self._size(entry, keys)
        overrides = self._overrides(entry, keys.get("overrides"))
        if kind is None or gpus is None or size is None:
            return None
        if kind == "placeholder":
            self._check_placeholder(keys)
            size = gpus
        elif gpus % size:
            file.complain(
                keys["num_gpus"],
                f"{gpus} GPUs do not divide into engines of {size}",
                "a multiple, or another num_gpus_per_engine",
            )
            return None
        return ServerGroup(
            worker_type=kind,
            num_gpus=gpus,
            num_gpus_per_engine=size,
            overrides=overrides,
            place=file.place(node),
        )

    def _kind(self, node: yaml.Node) -> GroupType | None:
        value = self._file.value(node)
        if value not in GROUP_TYPES:
            remedy = f"one of {', '.join(GROUP_TYPES)}"
            self._file.complain(node, f"worker_type is {value!r}", remedy)
            return None
        if value != "placeholder":
            problem = self._given.rules.worker_type(str(value))
            if problem is not None:
                self._file.complain(node, *problem)
        return cast(GroupType, value)

    def _size(self, entry: _Entry, keys: Mapping[str, yaml.Node]) -> int | None:
        node = keys.get("num_gpus_per_engine") or entry.keys.get("num_gpus_per_engine")
        if node is None:
            return self._given.num_gpus_per_engine
        size = self._file.count(node, "num_gpus_per_engine")
        problem = self._given.rules.size(size) if size is not None else None
        if problem is not None:
            self._file.complain(node, *problem)
        return size

    def _check_placeholder(self, keys: Mapping[str, yaml.Node]) -> None:
        for name in ("num_gpus_per_engine", "overrides"):
            if name in keys:
                self._file.complain(keys[name], f"{name} means nothing to a placeholder", "leave it out")

    def _overrides(self, entry: _Entry, node: yaml.Node | None) -> dict[str, Any]:
        if node is None:
            return {}
        file, found = self._file, {}
        for key, child in file.mapping(node, "overrides").items():
            name, value = key.replace("-", "_"), file.value(child)
            if name == "model_path":
                path = file.text(child, "model_path")
                entry.paths += [(child, path)] if path else []
                continue
            problem = self._given.rules.setting(name, value)
            if problem is not None:
                file.complain(child, f"{key}: {problem[0]}", problem[1])
            if name in found:
                file.complain(child, f"{name} is said twice in overrides", "keep one of them")
            found[name] = value
        return found

    def _model_path(self, entry: _Entry) -> str:
        """The model's folder. A group may name it too, but groups of a model serve the same one."""
        file, keys = self._file, entry.keys
        own = file.text(keys["model_path"], "model_path") if "model_path" in keys else None
        first = own or (entry.paths[0][1] if entry.paths else self._given.model_path)
        if first is None:
            file.complain(entry.node, f"{entry.name} has no model_path", "name it, or give --hf-checkpoint")
            return "?"
        some_do_not = own is None and 0 < len(entry.paths) < sum(g.num_engines > 0 for g in entry.groups)
        if some_do_not and not same_folder(first, self._given.model_path):
            remedy = "say it once, as the model's model_path"
            file.complain(entry.paths[0][0], f"only some groups of {entry.name} have this model_path", remedy)
        for node, path in entry.paths:
            if not same_folder(path, first):
                file.complain(
                    node,
                    f"{path!r} is not the model_path of {entry.name}, {first!r}",
                    "the groups of a model serve one folder; make it another model",
                )
        return first

    def _update_weights(self, entry: _Entry, model_path: str) -> bool:
        is_trained = same_folder(model_path, self._given.model_path)
        node = entry.keys.get("update_weights")
        if node is None:
            return is_trained
        value = self._file.boolean(node, "update_weights")
        if value and not is_trained and self._given.trains:
            self._file.complain(
                node,
                f"{entry.name} serves {model_path!r}, and gets the weights of {self._given.model_path!r}",
                "right where both have the same architecture; else false",
                warning=True,
            )
        return bool(value)
