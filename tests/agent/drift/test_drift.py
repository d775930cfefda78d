"""The drift corpus: whatever clients do to histories, each sampled token is trained once, or counted."""

import pytest

from slime.config.sections import EngineConfig
from slime.serving.background import ServerHandle
from tests.agent.drift.play import Conversation
from tests.agent.drift.stage import Stage, Style, real, scripted, served, tiny
from tests.agent.drift.traces import TRACES
from tests.agent.drift.truth import check, check_images, check_prompts
from tests.tiny import tiny_model_dir, tiny_tokenizer

TINY = [
    pytest.param(name, client, family, id=f"{name} - {client} - {family}")
    for name, trace in TRACES.items()
    for client in trace.clients
    for family in trace.families
]
EMBEDDED = [
    ("text trimmed", "chat"),
    ("thinking stripped", "responses"),
    ("compaction of a transcript in text", "responses"),
    ("a reminder that vanishes", "anthropic"),
    ("weights change in mid-session", "chat"),
]
REAL = [(name, trace.clients[0]) for name, trace in TRACES.items() if trace.real]


def play(trace, client, stage, url, **session):
    """Play a trace and check what its session gives; returns the samples."""
    session = {**trace.session, **session}
    with served(client, url, stage.style, session=session, **trace.adapter) as server:
        Conversation(stage, server, trace, client).play(trace.steps)
        samples = server.finish(**trace.finish)
        stage.assert_all_came()
        limit = trace.finish.get("max_sample_tokens", 0)
        check(stage.records, samples, server.adapter.manager.totals, max_tokens=limit)
        check_prompts(stage.records, server.adapter.model.template, stage.style.tokenizer)
        check_images(stage.records, samples, server.adapter.model.template)
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


@pytest.mark.parametrize(("name", "client"), EMBEDDED)
def test_law_1_on_a_model_that_samples(name, client, tmp_path):
    from slime.serving.embedded.engine import Engine

    config = EngineConfig(max_total_tokens=8192, context_length=2048, num_threads=1)
    engine = Engine(str(tiny_model_dir(tmp_path / "model", max_position_embeddings=2048)), config)
    sampling = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 1}
    with ServerHandle(engine, config) as server:
        stage = Stage(engine, Style(tiny_tokenizer(), "qwen", thinks=False))
        play(TRACES[name], client, stage, server.url, sampling_defaults=sampling)
    assert all(record.output_ids for record in stage.records)
