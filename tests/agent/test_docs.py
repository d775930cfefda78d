"""The generate hook of docs/en/agents.md, run as it stands there."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.utils.types import Sample
from tests.agent.templates import family_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "en" / "agents.md"


def test_the_hook_of_the_page_trains_what_it_sampled(monkeypatch):
    pytest.importorskip("openai")
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    hook = {}
    exec(compile(source, str(PAGE), "exec"), hook)
    tokenizer = family_tokenizer("chatml")
    with start_scripted_server(
        lambda call: ScriptedAnswer(text=f"answer {call.number}"), tokenizer
    ) as engine:
        hook["GenerateState"] = lambda args: SimpleNamespace(tokenizer=tokenizer)
        hook["get_model_url"] = lambda args: engine.url + "/generate"
        sample = Sample(index=3, rollout_id=4, prompt="question")
        params = {"temperature": 1.0, "max_new_tokens": 30}
        samples = asyncio.run(hook["generate"](None, sample, params))
        hook["_adapter"][1].stop()
    (row,) = samples
    assert (row.rollout_id, row.reward, row.metadata["segment"]) == (4, None, "final")
    assert sum(row.loss_mask) == 2 * len(tokenizer.encode("answer 0<|im_end|>"))
