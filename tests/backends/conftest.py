import pytest
import torch

from tests.tiny import tiny_model_dir


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
