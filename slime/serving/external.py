"""Engines and routers that others started: found out about, checked, used as they are.

Invariant: nothing here changes a server: what does not fit is an error that names server, field and both
values, all of them together. They are never started, stopped or offloaded by us.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime.config.problem import Problem
from slime.errors import ConfigError, EngineUnavailableError
from slime.serving.endpoint import EngineEndpoint, EngineKind, WorkerType
from slime.serving.topology import DEFAULT_MODEL, same_folder
from slime.serving.yaml_nodes import raise_problems

FLAG = "--rollout-external-engine-addrs"
_PATHS = ("/server_info", "/get_server_info")
_ROLES: Mapping[str, WorkerType] = {"null": "regular", "prefill": "prefill", "decode": "decode"}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a run needs of an engine that it did not start.

    Attributes:
        model_path: the folder that is trained.
        context_length: most tokens of prompt and answer, if bounded.
        settings: values that flags name, by field of SGLang's ServerArgs: compared, not applied.
        num_gpus: that the engines must have together, if given.
        takes_weights: whether the trainer's weights are sent there.
    """

    model_path: str | None = None
    context_length: int | None = None
    settings: Mapping[str, Any] | None = None
    num_gpus: int | None = None
    takes_weights: bool = True


@dataclass(frozen=True, kw_only=True)
class ExternalEngine:
    """One server as it was found.

    Attributes:
        info: its answer to ``/server_info``.
        bootstrap_port: of a prefilling one, for the router.
    """

    endpoint: EngineEndpoint
    info: Mapping[str, Any]
    bootstrap_port: int | None = None


def discover(
    addresses: Sequence[str], expected: Expected, *, timeout: float = 30.0
) -> tuple[ExternalEngine, ...]:
    """Ask the servers at ``host:port`` what they are, and check that a run can use them.

    Raises:
        ConfigError: an address is none, or servers do not fit; tells all that is wrong.
        EngineUnavailableError: one does not answer within `timeout` seconds.
    """
    urls = [url_of(address) for address in addresses]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise ConfigError(f"names {', '.join(twice)} twice", place=FLAG, remedy="name each server once")
    engines = tuple(
        _engine(index, url, server_info(url, timeout=timeout), expected) for index, url in enumerate(urls)
    )
    problems = [problem for engine in engines for problem in check(engine, expected)]
    raise_problems([*problems, *_together(engines, expected)], "what these servers are")
    return engines


def url_of(address: str) -> str:
    """``http://host:port`` of an address, which may be a URL already.

    Raises:
        ConfigError: host or port are missing.
    """
    text = address if "://" in address else f"http://{address}"
    parts = urlsplit(text)
    try:
        has_both = bool(parts.hostname) and parts.port is not None
    except ValueError:
        has_both = False
    if parts.scheme != "http" or not has_both or parts.path.strip("/"):
        raise ConfigError(f"expects host:port, got {address!r}", place=FLAG)
    return text.rstrip("/")


def server_info(url: str, *, timeout: float) -> dict[str, Any]:
    """What the server says about itself.

    Raises:
        EngineUnavailableError: no answer that is one.
    """
    causes = []
    for path in _PATHS:
        try:
            with _OPENER.open(url + path, timeout=timeout) as answer:
                info = json.load(answer)
        except (OSError, ValueError) as error:
            causes.append(f"{path}: {error}")
            continue
        if isinstance(info, dict):
            return info
        causes.append(f"{path}: answered {info!r:.100}")
    raise EngineUnavailableError(
        f"is no engine that answers ({'; '.join(causes)})", place=url, remedy=f"check {FLAG}"
    )


def check(engine: ExternalEngine, expected: Expected) -> list[Problem]:
    """What is wrong with one server."""
    info, place = engine.info, engine.endpoint.url
    problems = []
    if str(info.get("disaggregation_mode") or "null") not in _ROLES:
        mode = info.get("disaggregation_mode")
        problems.append(Problem(place, f"its disaggregation_mode is {mode!r}", f"one of {', '.join(_ROLES)}"))
    if info.get("is_embedding"):
        problems.append(Problem(place, "serves embeddings", "a server that generates"))
    if info.get("skip_tokenizer_init"):
        problems.append(Problem(place, "has no tokenizer (skip_tokenizer_init)", "start it with one"))
    served, length = info.get("model_path"), info.get("context_length")
    is_other = expected.model_path and served and not same_folder(str(served), expected.model_path)
    if is_other and not expected.takes_weights:
        problems.append(
            Problem(place, f"serves {served!r}, not {expected.model_path!r}", "start it with that model")
        )
    if expected.context_length and isinstance(length, int) and length < expected.context_length:
        problems.append(
            Problem(
                place,
                f"its context_length is {length}, the run's longest {expected.context_length} tokens",
                "start it with a longer one, or lower --rollout-max-context-len",
            )
        )
    for name, value in (expected.settings or {}).items():
        if name in info and info[name] != value:
            flag = "--sglang-" + name.replace("_", "-")
            problems.append(
                Problem(
                    place,
                    f"its {name} is {info[name]!r}, and {flag} says {value!r}",
                    "external servers are used as found: start it so, or leave the flag out",
                )
            )
    return problems


def _together(engines: Sequence[ExternalEngine], expected: Expected) -> list[Problem]:
    problems = []
    gpus = sum(engine.endpoint.world_size for engine in engines)
    if expected.num_gpus is not None and expected.num_gpus != gpus:
        problems.append(
            Problem(
                "--rollout-num-gpus", f"is {expected.num_gpus}; these servers have {gpus}", "leave it out"
            )
        )
    roles = {engine.endpoint.worker_type for engine in engines}
    if roles & {"prefill", "decode"} and roles != {"prefill", "decode"}:
        problems.append(
            Problem(
                FLAG, f"names servers that are {', '.join(sorted(roles))}", "prefill and decode, or regular"
            )
        )
    kinds = sorted({engine.endpoint.kind for engine in engines})
    if len(kinds) > 1 and expected.takes_weights:
        problems.append(
            Problem(
                FLAG,
                f"names servers of the kinds {' and '.join(kinds)}, which take weights in different ways",
                "servers of one kind",
            )
        )
    versions = {str(engine.info.get("weight_version", "default")) for engine in engines}
    if len(versions) > 1 and not expected.takes_weights:
        problems.append(
            Problem(FLAG, f"weight versions differ: {', '.join(sorted(versions))}", "bring them on one")
        )
    return problems


def _engine(index: int, url: str, info: Mapping[str, Any], expected: Expected) -> ExternalEngine:
    role = _ROLES.get(str(info.get("disaggregation_mode") or "null"), "regular")
    port = info.get("disaggregation_bootstrap_port")
    kind: EngineKind = "embedded" if info.get("engine") == "slime-embedded" else "sglang"
    endpoint = EngineEndpoint(
        name=f"{DEFAULT_MODEL}/external-{index}",
        url=url,
        kind=kind,
        worker_type=role,
        world_size=int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1),
        updates_weights=expected.takes_weights,
        is_external=True,
    )
    bootstrap = int(port) if role == "prefill" and port is not None else None
    return ExternalEngine(endpoint=endpoint, info=info, bootstrap_port=bootstrap)
