from examples.quickstart.make_data import rows
from examples.sft.make_data import conversation
from slime.config import load_config
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tests.agent.templates import family_tokenizer


def test_only_the_sum_of_a_conversation_trains():
    masks = MultiTurnLossMaskGenerator(family_tokenizer("chatml"))
    for row in rows(largest=3, held_out=2, seed=0)[0]:
        found = masks.get_text_from_loss_mask(*masks.get_loss_mask(conversation(row)["messages"]))
        assert found == [f"{row['label']}<|im_end|>"]


def test_held_out_sums_are_not_in_the_training_data():
    train, held_out = rows(largest=3, held_out=2, seed=0)
    asked = {row["input"][-1]["content"] for row in held_out}
    assert not asked & {conversation(row)["messages"][-2]["content"] for row in train}


def test_the_recipe_is_a_configuration_that_runs(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}\n")
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "train.jsonl")]
    config = load_config(["--config", "examples/sft/config.yaml", *words])
    assert config.learns_from_data and config.train_only and not config.reads_dumps
