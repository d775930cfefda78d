"""A run that trains adapters: the engine has the merged weights in every step, and the run resumes."""

import pytest

ADAPTERS = {"lora_rank": 8, "lora_alpha": 16, "lr": 3e-2}


@pytest.fixture(scope="module")
def lora_run(world):
    world.train(
        "lora",
        num_rollout=4,
        use_kl_loss=True,
        kl_loss_coef=0.001,
        gradient_checkpointing=True,
        save=world.folder / "lora-ckpt",
        save_interval=2,
        save_hf=world.folder / "lora-hf",
        **ADAPTERS,
    )
    return world


def test_engine_and_trainer_agree_while_the_policy_moves(lora_run):
    rows = [row for row in lora_run.metrics("lora") if "train/loss" in row]
    assert len(rows) == 4
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 1e-5
    assert rows[-1]["train/kl_loss"] > 10 * rows[0]["train/kl_loss"]


def test_the_export_has_a_merged_and_a_peft_folder(lora_run):
    folder = lora_run.folder / "lora-hf"
    assert (folder / "model.safetensors").is_file()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_a_resumed_run_goes_on_and_one_with_other_adapters_is_told(lora_run):
    checkpoint = lora_run.folder / "lora-ckpt"
    options = {"num_rollout": 5, "load": checkpoint, "use_kl_loss": True, "kl_loss_coef": 0.001}
    lora_run.train("lora-resumed", **options, **ADAPTERS)
    rows = [row for row in lora_run.metrics("lora-resumed") if "train/loss" in row]
    assert len(rows) == 1 and rows[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    text = lora_run.train("lora-other", code=2, **options, **(ADAPTERS | {"lora_rank": 4}))
    assert "its adapters have rank 8, the run's 4" in text
