import json
from types import SimpleNamespace

import pytest

from slime.errors import ConfigError, DataError
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.convert import to_train_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.groups import flatten
from slime.rollout.sft_rollout import generate_rollout
from slime.utils.types import Sample
from tests.agent.templates import family_tokenizer

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    family_tokenizer("qwen3").save_pretrained(folder)
    return str(folder)


def args_for(model, tmp_path, rows, **values):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {
        "hf_checkpoint": model,
        "prompt_data": str(path),
        "input_key": "messages",
        "tool_key": "tools",
    }
    return SimpleNamespace(**(defaults | {"rollout_batch_size": 2, "n_samples_per_prompt": 1} | values))


def step(args, source=None):
    source = source or RolloutDataSourceWithBuffer(args)
    return call_rollout_fn(generate_rollout, args, 0, source, evaluation=False)


def talk(question, answer, **more):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def texts(sample):
    tokenizer = family_tokenizer("qwen3")
    prompt = tokenizer.decode(sample.tokens[: sample.prompt_length])
    trained = zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True)
    return prompt, tokenizer.decode([token for token, trains in trained if trains])


def test_a_response_begins_with_the_first_trained_token_and_goes_to_the_end(model, tmp_path):
    first = talk("a", "b", step_loss_mask=0)
    args = args_for(model, tmp_path, [{"messages": [*first, *talk("c", "d"), *talk("e", "f")]}])
    (sample,) = flatten(step(args).samples[:1])
    prompt, trained = texts(sample)
    assert prompt.endswith("b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")
    assert trained == "d<|im_end|><think>\n\n</think>\n\nf<|im_end|>"
    assert sample.loss_mask[0] == 1 and sample.response.endswith("f<|im_end|>\n")
    assert (sample.reward, sample.status) == (0.0, Sample.Status.COMPLETED)


def test_groups_and_ids_are_the_data_sources_and_rows_can_train(model, tmp_path):
    rows = [{"messages": talk(f"q{i}", f"a{i}")} for i in range(3)]
    args = args_for(model, tmp_path, rows, n_samples_per_prompt=2)
    source = RolloutDataSourceWithBuffer(args)
    step(args, source)
    output = step(args, source)
    assert [[sample.rollout_id for sample in group] for group in output.samples] == [[4, 5], [6, 7]]
    trained = to_train_samples(output.samples, args)
    assert [(row.group_index, row.reward, row.votes) for row in trained] == [(2, 0.0, True)] * 2 + [
        (3, 0.0, True)
    ] * 2
    assert output.metrics["rollout/sft/trained_tokens"] == sum(sum(row.loss_mask) for row in trained)
    assert output.metrics["rollout/sft/tokens"] == sum(len(row.tokens) for row in trained)


def test_tools_of_a_row_are_in_its_prompt(model, tmp_path):
    rows = [{"messages": talk("a", "b"), "tools": [TOOL]}, {"messages": talk("a", "b")}]
    with_tools, without = flatten(step(args_for(model, tmp_path, rows)).samples)
    assert '"name": "read"' in texts(with_tools)[0]
    assert texts(with_tools)[1] == texts(without)[1]


def test_options_of_the_template_are_those_of_the_flag_and_of_the_sample(model, tmp_path):
    args = args_for(model, tmp_path, [{"messages": talk("a", "b")}], rollout_batch_size=1)
    args.apply_chat_template_kwargs = {"enable_thinking": False}
    (sample,) = flatten(step(args).samples)
    assert texts(sample)[1] == "b<|im_end|>"
    source = RolloutDataSourceWithBuffer(args)
    source.dataset.samples[0].apply_chat_template_kwargs = {"enable_thinking": True}
    (sample,) = flatten(step(args, source).samples)
    assert texts(sample)[1] == "<think>\n\n</think>\n\nb<|im_end|>"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": "a text"}, "sample 0: the prompt is a text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "sample 0: no token trains"),
        ({"messages": talk("a", "b", step_loss_mask=0)}, "sample 0: no token trains"),
        ({"messages": talk("a", 3)}, "sample 0, message 1: content is neither"),
    ],
)
def test_what_cannot_be_trained_on_is_named(model, tmp_path, row, words):
    with pytest.raises(DataError, match=words):
        step(args_for(model, tmp_path, [row]))


def test_there_is_no_evaluation(model, tmp_path):
    with pytest.raises(ConfigError, match="does not evaluate"):
        generate_rollout(args_for(model, tmp_path, []), 0, None, evaluation=True)


def test_an_unknown_type_of_mask_is_refused(model, tmp_path):
    args = args_for(model, tmp_path, [{"messages": talk("a", "b")}], loss_mask_type="gpt")
    with pytest.raises(ConfigError, match="--loss-mask-type"):
        step(args)
