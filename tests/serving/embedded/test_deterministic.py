"""Deterministic inference: an answer depends on its own request and the weights, on nothing else."""

import pytest

from tests.serving.embedded.harness import generate, one, request, running
from tests.tiny import tiny_model_dir

PROMPTS = [list(range(10, 10 + length)) for length in (5, 40, 41, 90, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("deterministic") / "m", initializer_range=0.2)


def asked(prompts=PROMPTS):
    return [
        request(prompt, greedy=False, sampling_seed=n, max_new_tokens=70) for n, prompt in enumerate(prompts)
    ]


def answers(updates):
    """Tokens and log-probs, to the last bit."""
    return [(update.output_ids, [value.hex() for value in update.output_logprobs]) for update in updates]


def test_answers_are_the_same_to_the_last_bit_alone_together_again_and_in_another_engine(folder):
    with running(folder, enable_deterministic_inference=True) as engine:
        alone = answers(generate(engine, [r])[0] for r in asked())
        assert answers(generate(engine, asked())) == alone
        backwards = answers(generate(engine, asked()[::-1]))
        assert backwards[::-1] == alone
    with running(folder, enable_deterministic_inference=True, chunked_prefill_size=2048) as engine:
        assert answers(generate(engine, asked())) == alone


def test_nothing_is_reused_and_one_request_runs_at_a_time(folder):
    with running(folder, enable_deterministic_inference=True) as engine:
        one(engine, PROMPTS[3])
        again = one(engine, PROMPTS[3])
        assert again.cached_tokens == 0
        generate(engine, asked())
        assert engine.stats.reusable_tokens == 0
        assert engine.stats.steps >= 70 * len(PROMPTS)
