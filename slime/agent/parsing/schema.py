"""Which JSON types a tool's parameters may have, by the tool's schema.

Resolves unions and references within the schema; knows nothing of outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import orjson

Kinds: TypeAlias = frozenset[str]
STRING: Kinds = frozenset({"string"})
NOT_STRING: Kinds = frozenset({"null", "boolean", "integer", "number", "array", "object"})
_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def parameters_by_tool(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of the arguments of each tool, by its name; `tools` are OpenAI's function schemas."""
    functions = (tool.get("function") or tool for tool in tools)
    return {str(function.get("name")): function.get("parameters") or {} for function in functions}


def kinds_of(schema: Mapping[str, Any], parameter: str) -> Kinds:
    """The JSON types that `parameter` may have; string where the schema does not say."""
    properties = schema.get("properties")
    wanted = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_kinds(wanted, schema, frozenset())) or STRING


def as_json(text: str, kinds: Kinds) -> str:
    """`text` as it is written where it is JSON of one of the `kinds`, else as a JSON string."""
    plain = _PYTHON_NAMES.get(text.strip(), text.strip())
    try:
        value = orjson.loads(plain)
    except orjson.JSONDecodeError:
        return as_string(text)
    whole = isinstance(value, float) and value.is_integer()
    fitting = {_KINDS[type(value)]} | ({"integer"} if whole else set())
    fitting |= {"number"} if "integer" in fitting else set()
    return plain if fitting & (kinds - STRING) else as_string(text)


def as_string(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: Any, root: Mapping[str, Any], seen: frozenset[int]) -> Iterator[str]:
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen |= {id(schema)}
    declared = schema.get("type", [])
    if declared:
        yield from [declared] if isinstance(declared, str) else map(str, declared)
        return
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    yield from (_KINDS.get(type(value), "string") for value in values)
    for union in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(union) or []:
            yield from _kinds(branch, root, seen)
    yield from _kinds(_resolved(schema.get("$ref"), root), root, seen)


def _resolved(reference: Any, root: Mapping[str, Any]) -> Any:
    """What ``#/a/b`` names within `root`, or None."""
    target: Any = root if isinstance(reference, str) and reference.startswith("#/") else None
    for part in str(reference).split("/")[1:]:
        target = target.get(part) if isinstance(target, Mapping) else None
    return target
