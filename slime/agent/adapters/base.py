"""`BaseAdapter`: sessions behind an HTTP application that speaks a model provider's protocol.

Message history in, sampled tokens out. Invariant: only sessions that were opened are served, until they are
finished; a request's failure has its protocol's shape and ends no other request. Knows no
protocol.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

from aiohttp import web

from slime.agent.adapters.exchange import (
    Exchange,
    StoredReply,
    closing_reply,
    replay,
)
from slime.agent.adapters.guard import Guard, Handler
from slime.agent.adapters.http import (
    BODY_BYTES,
    Connection,
    cut_off,
    json_response,
    named_session,
    read_body,
)
from slime.agent.adapters.images import ImageGate
from slime.agent.adapters.model import Model, sampling_params
from slime.agent.adapters.sessions import Session, Sessions
from slime.agent.adapters.wire import AdapterError, ModelRequest, ReplyWriter, WireProtocol
from slime.agent.messages import Message
from slime.agent.session import OpenTurnError, Prompt, UnknownTurnError
from slime.agent.template_probe import TemplateRefusalError
from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.agent.tree import Node
from slime.agent.turn import Turn
from slime.errors import ConfigError
from slime.utils.engine_answers import OnTokens
from slime.utils.engine_client import EngineClient
from slime.utils.generation import Generation
from slime.utils.request_scope import entered
from slime.utils.types import Sample

DebugCallback: TypeAlias = Callable[
    [str, Sequence[Message], Sequence[dict[str, Any]], Message, TurnRecord], None
]
TurnCapReply: TypeAlias = Literal["429", "final_turn"]
ENGINE_SECONDS = 900.0
CLOSING_TEXT = "The turn limit of this run is reached."


class BaseAdapter:
    """Serves sessions in the protocols that a subclass names.

    Args:
        tokenizer: a Hugging Face tokenizer, or what has its `apply_chat_template` and `decode`.
        sglang_url: an engine, or a router before several; with or without ``/generate``.
        tool_parser: see `slime.agent.parsing`; None takes what the chat template tells.
        reasoning_parser: likewise.
        max_turns_per_sid: most sampled answers of a session.
        fork_threshold_tokens: see `TrajectoryManager`; None never masks a sampled token.
        debug_callback: called with session id, messages, tools, answer and turn when a turn is recorded.
        turn_cap_reply: what a session gets past its cap: ``429``, or a closing answer that ends every client.
        max_concurrent_requests: more are refused as overload.
        allow_unknown_sessions: open a session for any id that comes; for experiments.
        engine_timeout: seconds that the engine gets for an answer.
        return_routed_experts: record the routes of a mixture-of-experts engine.
        chat_template_kwargs: passed to the chat template, such as ``enable_thinking``.
        accepts_images: the model takes images; None: if its chat template shows them.
        allow_image_urls: the engine may fetch ``http(s)`` URLs that clients name, from where it stands.

    Attributes:
        app: the aiohttp application.
        model: tokenizer, chat template and output formats.
        manager: turns and samples.
        counters: requests, errors by kind, replayed answers, broken connections.
    """

    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)
    log_prefix: ClassVar[str] = "adapter"

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: DebugCallback | None = None,
        turn_cap_reply: TurnCapReply = "429",
        max_concurrent_requests: int = 1024,
        allow_unknown_sessions: bool = False,
        engine_timeout: float = ENGINE_SECONDS,
        return_routed_experts: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        accepts_images: bool | None = None,
        allow_image_urls: bool = False,
    ) -> None:
        if turn_cap_reply not in ("429", "final_turn"):
            raise ConfigError(f"turn_cap_reply is {turn_cap_reply!r}", remedy="use '429' or 'final_turn'")
        self.model = Model(
            tokenizer,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            chat_template_kwargs=chat_template_kwargs,
        )
        for line in self.model.template.report.lines():
            self.logger.info("%s: %s", self.log_prefix, line)
        self.manager = TrajectoryManager(fork_threshold_tokens=fork_threshold_tokens or 0)
        self._sessions = Sessions(self.manager, self.model.template, allow_unknown=allow_unknown_sessions)
        self.store = self._sessions.open_by_name
        self._guard = Guard(self.protocols(), self.logger, self.log_prefix)
        self.counters = self._guard.counters
        self._images = ImageGate(self.model.template, accepts=accepts_images, allow_urls=allow_image_urls)
        self._engine = EngineClient(sglang_url.removesuffix("/generate"))
        self._max_turns = max_turns_per_sid
        self._turn_cap_reply = turn_cap_reply
        self._debug_callback = debug_callback
        self._engine_timeout = engine_timeout
        self._return_routed_experts = return_routed_experts
        self._free = max_concurrent_requests
        self._started = time.time()
        self._loop: asyncio.AbstractEventLoop | None = None

        self.app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guard.middleware()])
        self.app.on_startup.append(self._remember_loop)
        self.app.on_cleanup.append(self._forget_loop)
        self._register_routes()

    def protocols(self) -> Mapping[str, WireProtocol]:
        """The protocol of each path; the first is also the shape of errors elsewhere."""
        raise NotImplementedError

    def _register_routes(self) -> None:
        """All routes, each also below a session's prefix."""
        for path, protocol in self.protocols().items():
            self._route("POST", path, partial(self._handle, protocol=protocol))
        self._route("GET", "/v1/models", self._models)
        self._route("GET", "/healthz", self._healthz)
        for path in ("", "/", "/api/hello", "/v1"):
            self._route("HEAD", path, self._healthz)

    def _route(self, method: str, path: str, handler: Handler) -> None:
        for prefix in ("", "/s/{sid}"):
            self.app.router.add_route(method, prefix + path, handler)

    async def _remember_loop(self, _: web.Application) -> None:
        """The application's tasks live on this loop; sessions may be finished from any."""
        self._loop = asyncio.get_running_loop()

    async def _forget_loop(self, _: web.Application) -> None:
        self._loop = None

    # Sessions

    def open_session(
        self,
        sid: str,
        *,
        sampling_defaults: Mapping[str, Any] | None = None,
        max_context_tokens: int = 0,
    ) -> None:
        """Serve requests that name `sid`.

        Args:
            sampling_defaults: SGLang sampling parameters of every turn (law 7: clients do not change them).
            max_context_tokens: most tokens of prompt and answer; 0: the engine's limit. Of an image only the
                placeholder counts here; the engine counts what it expands it to.

        Raises:
            ValueError: the session is open already, or was finished.
        """
        self._sessions.open(sid, sampling_defaults=sampling_defaults, max_context_tokens=max_context_tokens)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample | None = None,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """Close a session, if it is still open, and take its samples, their `response` decoded.

        Args:
            wait_timeout: seconds that requests in flight get to end; then they are cancelled.

        Raises:
            ValueError: there is no such session, or its samples were taken.
        """
        if sid not in self.store and not self.manager.has_session(sid):
            raise ValueError(f"session {sid!r} is not open")
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        samples = self.manager.get_trajectory(
            sid,
            base_sample=base_sample or Sample(session_id=sid),
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=max_sample_tokens,
        )
        for sample in samples:
            sample.response = self.model.tokenizer.decode(sample.tokens[-sample.response_length :])
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Close a session and forget its turns; an unknown one is no error."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        self.manager.drop_session(sid)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Take no more requests of a session, and end those in flight; its turns are kept."""
        closing = self._sessions.close(sid, wait_timeout=wait_timeout)
        if self._loop is None or self._loop is asyncio.get_running_loop():
            await closing
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(closing, self._loop))

    # Requests

    async def _handle(self, http: web.Request, protocol: WireProtocol) -> web.StreamResponse:
        async with self._admitted(http) as (sid, session, body):
            request = self._translate(protocol, http, body, session)
            await self._images.check_engine(request.messages, self._engine)
            return await self._answer(http, protocol, request, sid, session)

    @asynccontextmanager
    async def _admitted(self, http: web.Request) -> AsyncIterator[tuple[str, Session, dict[str, Any]]]:
        """The session and the body of a request that may be answered; it is in flight meanwhile.

        A session that path or headers name is looked up before the body is read.
        """
        if not self._free:
            raise AdapterError("overloaded", "too many requests at once", retry_after=1.0)
        task = asyncio.current_task()
        assert task is not None
        self._free -= 1
        session: Session | None = None
        try:
            named = self._session_id(http, {})
            if named:
                self._sessions.get(named)
            body = await self._preprocess_body(http, await read_body(http))
            sid = self._session_id(http, body)
            session = self._sessions.get(sid)
            session.inflight.add(task)
            yield sid, session, body
        finally:
            self._free += 1
            if session is not None:
                session.inflight.discard(task)

    async def _preprocess_body(self, http: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        """For subclasses: change a body before it is translated."""
        return body

    def _session_id(self, http: web.Request, body: Mapping[str, Any]) -> str:
        """The session that a request names."""
        return named_session(http, body)

    def _translate(
        self, protocol: WireProtocol, http: web.Request, body: Mapping[str, Any], session: Session
    ) -> ModelRequest:
        """A body in the common form."""
        request = protocol.translate(body, http.headers, session.translations)
        if not request.stream and "text/event-stream" in http.headers.get("Accept", ""):
            request = replace(request, stream=True)
        self._images.check(request.messages)
        return request

    async def _answer(
        self,
        http: web.Request,
        protocol: WireProtocol,
        request: ModelRequest,
        sid: str,
        session: Session,
    ) -> web.StreamResponse:
        prompt = _prompt(session, request)
        self._images.check_prompt(prompt.images)
        connection = Connection(http, stream=request.stream)
        key = prompt.place.node
        stored = await self._told_before(http, session, key)
        if stored is not None:
            self._guard.count("replayed")
            writer = self._build_reply(protocol, request)
            response, handles = await replay(writer, stored[1], connection)
            stored[0].delivered = True
            self.manager.add_handles(sid, stored[0], handles)
            return response
        has_turns = self._max_turns is None or session.turns + session.running < self._max_turns
        if not has_turns or session.is_stopped:
            return await self._capped(protocol, request, connection, len(prompt.ids), session)
        exchange = self._exchange(protocol, request, prompt, sid, session, connection)
        done = session.asked[key] = asyncio.Event()
        session.running += 1
        try:
            return await self._respond(exchange)
        except (AdapterError, ConnectionResetError) as error:
            if not connection.is_open or isinstance(error, ConnectionResetError):
                raise
            self._guard.count_error(error)
            return await connection.finish(dict)
        except Exception:  # the request handler boundary: what has begun as a stream cannot become an error
            if not connection.is_open:
                raise
            self.logger.exception("%s: %s %s failed", self.log_prefix, http.method, http.path)
            return cut_off(http)
        finally:
            session.running -= 1
            done.set()
            if session.asked.get(key) is done:
                del session.asked[key]

    def _build_reply(self, protocol: WireProtocol, request: ModelRequest) -> ReplyWriter:
        """What puts the answer on the wire."""
        return protocol.writer(request)

    async def _respond(self, exchange: Exchange) -> web.StreamResponse:
        """Sample and answer."""
        return await exchange.run()

    async def _told_before(
        self, http: web.Request, session: Session, node: Node
    ) -> tuple[Turn, StoredReply] | None:
        """The answer to the same prompt, where the client asks again because it did not get it."""
        is_retry = http.headers.get("X-Stainless-Retry-Count", "0") not in ("", "0")
        try:
            async with asyncio.timeout(self._engine_timeout):
                while is_retry and node in session.asked:
                    await session.asked[node].wait()
        except TimeoutError as error:
            raise AdapterError("overloaded", "the request that this one repeats has no answer yet") from error
        for child in reversed(node.children):
            if child.turn in session.replies and (is_retry or not child.turn.delivered):
                return child.turn, session.replies[child.turn]
        return None

    async def _capped(
        self,
        protocol: WireProtocol,
        request: ModelRequest,
        connection: Connection,
        prompt_tokens: int,
        session: Session,
    ) -> web.StreamResponse:
        """What ends the client: a refusal, or a closing text that is in no sample."""
        self._guard.count("stopped" if session.is_stopped else "capped")
        if session.scope is not None and session.scope.stopped:
            session.scope.interrupted = True
        if self._turn_cap_reply == "429" and not session.is_stopped:
            raise AdapterError("rate_limit", f"this session has had its {self._max_turns} turns")
        reply = closing_reply(CLOSING_TEXT, prompt_tokens)
        return (await replay(self._build_reply(protocol, request), reply, connection))[0]

    def _exchange(
        self,
        protocol: WireProtocol,
        request: ModelRequest,
        prompt: Prompt,
        sid: str,
        session: Session,
        connection: Connection,
    ) -> Exchange:
        opening = self.model.opening(request)
        if opening is None:
            self._guard.count("undemanded")
        if opening:
            prompt = prompt.opened(self.model.template.encode(opening))
        params = sampling_params(
            request,
            session.sampling_defaults,
            stop_ids=self.model.template.stop_ids,
            prompt_tokens=len(prompt.ids),
            max_context_tokens=session.max_context_tokens,
        )

        async def generate(on_tokens: OnTokens | None) -> Generation:
            with entered(session.scope):
                return await self._engine.generate(
                    prompt.ids,
                    params,
                    routing_key=sid,
                    timeout=self._engine_timeout,
                    on_tokens=on_tokens,
                    image_data=[image.url for image in prompt.images],
                    return_routed_experts=self._return_routed_experts,
                )

        def record(turn: TurnRecord, message: Message) -> Turn:
            session.turns += turn.delivered
            if prompt.place.anchor_turn is not None:
                session.replies.pop(prompt.place.anchor_turn, None)
            recorded = self.manager.record_at(sid, prompt.place, turn=turn, response_message=message)
            if self._debug_callback is not None:
                self._debug_callback(sid, request.messages, request.tools, message, turn)
            return recorded

        return Exchange(
            protocol=protocol,
            request=request,
            prompt=prompt,
            output=self.model.output(request, prompt, opening or ""),
            generate=generate,
            record=record,
            keep_reply=session.replies.__setitem__,
            count_reasoning=self.model.count_tokens,
            connection=connection,
            writer=self._build_reply(protocol, request),
        )

    # What is no turn

    async def _count_tokens(self, http: web.Request, protocol: WireProtocol) -> web.StreamResponse:
        """The number of prompt tokens that a request would have; an image counts as its placeholder."""
        async with self._admitted(http) as (sid, session, body):
            prompt = _prompt(session, self._translate(protocol, http, body, session))
        self.manager.forget_place(sid, prompt.place)
        return json_response({"input_tokens": len(prompt.ids)})

    async def _models(self, http: web.Request) -> web.StreamResponse:
        names = ("slime-actor",)
        models = [
            {
                "id": name,
                "object": "model",
                "type": "model",
                "created": int(self._started),
                "owned_by": "slime",
            }
            for name in names
        ]
        return json_response({"object": "list", "data": models, "has_more": False})

    async def _healthz(self, http: web.Request) -> web.StreamResponse:
        return json_response({"ok": True})


def _prompt(session: Session, request: ModelRequest) -> Prompt:
    try:
        return session.tokens.prompt(
            request.messages, request.tools, continues=request.continues, references=request.references
        )
    except OpenTurnError as error:
        raise AdapterError(
            "invalid_request", "messages: the last one must be a user's or a tool's"
        ) from error
    except TemplateRefusalError as error:
        raise AdapterError("invalid_request", f"messages: {error}") from error
    except UnknownTurnError as error:
        raise AdapterError("not_found", str(error)) from error
