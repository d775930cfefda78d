import asyncio
import socket

import pytest
from aiohttp import web

from slime.utils import http_utils
from slime.utils.http_utils import HttpError, get, post


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(http_utils, "backoff_seconds", lambda attempt: 0.001)


def with_server(handler, client):
    """Run `client(url, seen)` against a server whose requests are appended to `seen`."""
    seen = []

    async def recorded(request):
        seen.append(request)
        return await handler(request, len(seen))

    async def main():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", recorded)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await client(f"http://127.0.0.1:{port}/x", seen)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_post_sends_json_and_headers_and_parses_the_answer():
    async def echo(request, count):
        return web.json_response({"got": await request.json(), "key": request.headers["X-Key"]})

    answer = with_server(echo, lambda url, seen: post(url, {"a": [1]}, headers={"X-Key": "k"}))
    assert answer == {"got": {"a": [1]}, "key": "k"}


def test_get_returns_text_that_is_not_json():
    async def text(request, count):
        return web.Response(text="Cache flushed")

    assert with_server(text, lambda url, seen: get(url)) == "Cache flushed"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_passing_trouble_is_retried(status):
    async def third_time(request, count):
        return web.json_response(count) if count == 3 else web.Response(status=status)

    assert with_server(third_time, lambda url, seen: post(url, {})) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_wrong_requests_are_not_retried_and_named(status):
    async def refuse(request, count):
        return web.Response(status=status, text="token 999 is outside the vocabulary")

    async def client(url, seen):
        with pytest.raises(HttpError, match=f"{url}: status {status}: token 999") as caught:
            await post(url, {})
        assert (caught.value.status, caught.value.body) == (status, "token 999 is outside the vocabulary")
        assert len(seen) == 1

    with_server(refuse, client)


def test_retries_are_bounded_and_the_last_answer_is_told():
    async def busy(request, count):
        return web.Response(status=503, text="busy")

    async def client(url, seen):
        with pytest.raises(HttpError, match=r"status 503 \(3 tries\): busy"):
            await post(url, {}, 2)
        assert len(seen) == 3

    with_server(busy, client)


def test_dropped_connection_is_retried():
    async def drop_first(request, count):
        if count == 1:
            request.transport.abort()
        return web.json_response(count)

    assert with_server(drop_first, lambda url, seen: post(url, {})) == 2


def test_refused_connection_names_the_url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/x"
    with pytest.raises(HttpError, match=rf"POST {url}: .*\(2 tries\)"):
        asyncio.run(post(url, {}, 1))


def test_silence_ends_at_the_deadline_without_a_retry():
    async def never(request, count):
        await asyncio.sleep(60)

    async def client(url, seen):
        with pytest.raises(HttpError, match=r"no answer within 0\.05 s"):
            await get(url, timeout=0.05)
        assert len(seen) <= 1

    with_server(never, client)


def test_answer_that_claims_to_be_json_and_is_not_is_an_error():
    async def broken(request, count):
        return web.Response(text="{", content_type="application/json")

    async def client(url, seen):
        with pytest.raises(HttpError, match="not JSON"):
            await get(url)

    with_server(broken, client)


def test_one_session_a_loop_which_ends_with_it():
    async def main():
        first, second = await http_utils.http_session(), await http_utils.http_session()
        assert first is second
        return first

    session = asyncio.run(main())
    assert session.closed
    assert asyncio.run(main()) is not session
    assert sum(loop.is_closed() for loop in http_utils._sessions) == 1
