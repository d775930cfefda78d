"""A bucket of weights and a reader of messages about it, for processes that load little."""

import base64
import pickle

import torch

from slime.serving.weights.outgoing import Outgoing

BUCKET = [
    Outgoing("a", torch.arange(100.0), torch.bfloat16),
    Outgoing("b", torch.ones(3, 5), torch.float32),
    Outgoing("c", torch.tensor(7), torch.int64),
]


def read(message):
    """Name, dtype, shape and sum of each tensor of a message, as SGLang maps it."""
    data = pickle.loads(base64.b64decode(message))
    flat = data["flattened_tensor"]
    return [
        (
            m.name,
            str(m.dtype),
            tuple(m.shape),
            flat[m.start_idx : m.end_idx].view(m.dtype).float().sum().item(),
        )
        for m in data["metadata"]
    ]
