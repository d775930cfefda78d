"""The drift corpus: whatever clients do to histories, each sampled token is trained once, or counted."""

import pytest

from slime.config.sections import EngineConfig
from slime.serving.background import ServerHandle
from tests.agent.drift import traces
from tests.agent.drift.play import Conversation
from tests.agent.drift.stage import Stage, real, scripted, served, tiny
from tests.agent.drift.traces import TRACES
from tests.agent.drift.truth import check
from tests.tiny import tiny_model_dir, tiny_tokenizer

TINY = [
    pytest.param(name, client, family, id=f"{name} - {client} - {family}")
    for name, trace in TRACES.items()
    for client in trace.clients
    for family in trace.families
]
REAL = [(name, trace.clients[0]) for name, trace in TRACES.items() if trace.real]


def play(trace, client, stage, url, **session):
    """Play a trace and check what its session gives; returns the samples."""
    session = {**trace.session, **session}
    with served(client, url, stage.style, session=session, **trace.adapter) as server:
        Conversation(stage, server, trace, client).play(trace.steps)
        samples = server.finish(**trace.finish)
        stage.assert_all_came()
        check(stage.records, samples, server.adapter.manager.totals, max_tokens=trace.finish.get("max_sample_tokens", 0))
    assert [sample.metadata["segment"] for sample in samples] == list(trace.segments)
    return samples


@pytest.mark.parametrize(("name", "client", "family"), TINY)
def test_law_1_each_sampled_token_trains_once(name, client, family):
    with scripted(tiny(family)) as (stage, url):
        samples = play(TRACES[name], client, stage, url)
    assert sum(sample.metadata["ill_formed"] for sample in samples) == TRACES[name].ill_formed


@pytest.mark.parametrize("model", ["qwen3", "llama3_1", "smollm2", "deepseek"])
@pytest.mark.parametrize(("name", "client"), REAL)
def test_law_1_on_real_tokenizers(name, client, model):
    with scripted(real(model)) as (stage, url):
        play(TRACES[name], client, stage, url)
