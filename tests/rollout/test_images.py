import asyncio
import base64
import io

import pytest

from slime.errors import DataError
from slime.rollout.generate import generate_sample
from slime.rollout.images import image_data
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.utils.engine_client import EngineClient
from slime.utils.types import Sample
from tests.rollout.kit import tokenizer

URL = "data:image/png;base64,AAAA"


class Picture:
    """As Pillow's."""

    def save(self, file: io.BytesIO, format: str) -> None:
        file.write(f"as {format}".encode())


def test_the_engine_gets_a_samples_images_in_their_order():
    images = [URL, Picture()]
    sample = Sample(tokens=[5, 6], index=0, multimodal_inputs={"images": images, "videos": []})
    policy = lambda call: ScriptedAnswer(token_ids=[70])  # noqa: E731
    with start_scripted_server(policy, tokenizer(), takes_images=True) as server:
        engine = EngineClient(server.url)
        options = {"tokenizer": tokenizer(), "max_context_len": None, "timeout": 20.0}
        asyncio.run(generate_sample(sample, {"max_new_tokens": 4}, engine=engine, **options))
        (call,) = server.engine.calls
    encoded = base64.b64encode(b"as PNG").decode()
    assert call.images == (URL, f"data:image/png;base64,{encoded}")
    assert sample.multimodal_inputs["images"] is images


@pytest.mark.parametrize("inputs", [None, {}, {"images": []}, {"images": None}])
def test_most_samples_have_none(inputs):
    assert image_data(Sample(multimodal_inputs=inputs)) == []


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"videos": ["x"]}, "sample 7: multimodal_inputs holds videos"),
        ({"images": [b"x"]}, "sample 7: an image is a bytes"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(inputs, words):
    with pytest.raises(DataError, match=words):
        image_data(Sample(index=7, multimodal_inputs=inputs))
