"""An agent whose rollout is stopped keeps what was sampled, and comes to its end by itself."""

import asyncio
import json

import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.serving.scripted import ScriptedAnswer
from slime.utils.request_scope import RequestScope, entered
from slime.utils.types import Sample
from tests.agent.adapters.test_base import CHAT, ask, start, tokens_trained, wait_for
from tests.agent.kit import SID, served

ANSWER = ScriptedAnswer(text="abcdefgh" * 50, token_latency=0.05)
KINDS = {
    CHAT: (OpenAIAdapter, ask()),
    "/v1/messages": (AnthropicAdapter, ask() | {"model": "m", "max_tokens": 1000}),
}


@pytest.mark.parametrize("path", KINDS)
def test_a_stop_ends_the_answer_under_way_and_then_the_agent(path):
    kind, body = KINDS[path]
    scope, calls = RequestScope(), []
    scope.on_call = calls.append
    with served(kind, lambda call: ANSWER, sid=None) as server:
        with entered(scope):
            server.adapter.open_session(SID)
        connection = start(server, body, path=path)
        wait_for(lambda: server.engine.calls)
        wait_for(lambda: server.engine.stats.used_tokens > len(server.engine.calls[0].input_ids) + 2)
        asyncio.run(scope.stop(10.0))
        first = json.loads(connection.getresponse().read())
        status, closing = server.post(path, body | {"messages": [{"role": "user", "content": "go on"}]})
        assert status == 200 and "turn limit" in json.dumps(closing)
        assert len(server.engine.calls) == 1 and server.adapter.counters["stopped"] == 1
        (sample,) = server.finish()
    assert [call.finish for call in calls] == ["abort"]
    assert sample.status is Sample.Status.ABORTED
    assert 0 < tokens_trained([sample]) < 400 and "abc" in json.dumps(first)
