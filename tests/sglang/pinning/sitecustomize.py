"""For a CPU: SGLang's store of routed experts pins its memory by CUDA, which is not there; it works unpinned.

Loaded by the engine's interpreter where this folder is on PYTHONPATH.
"""

import importlib.abc
import importlib.util
import sys

NAME = "sglang.srt.mem_cache.pool_host.common"


class Unpinned(importlib.abc.MetaPathFinder):
    """Takes the pinning out of the one module that does it, when it is imported."""

    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module._cuda_host_register = lambda *args, **kwargs: None

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Unpinned())
