"""On PYTHONPATH of a server with adapters: SGLang pins memory for them, which needs a GPU's allocator."""

import importlib.abc
import sys


class BeforeLora(importlib.abc.MetaPathFinder):
    """Finds nothing; lets torch forget about pinning when SGLang's adapters are looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.lora.layers":
            sys.meta_path.remove(self)
            import torch

            torch.Tensor.pin_memory = lambda tensor, *_: tensor
            for maker in ("tensor", "empty", "zeros"):
                setattr(torch, maker, unpinned(getattr(torch, maker)))


def unpinned(make):
    """The same function, deaf to `pin_memory`."""
    return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)


sys.meta_path.insert(0, BeforeLora())
