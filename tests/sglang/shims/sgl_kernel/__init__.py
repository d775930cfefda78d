"""Stands in for SGLang's CUDA kernels: everything imports, nothing can be called.

Submodules are not there: SGLang falls back where they are missing, and would not where they are pretended.
"""

__version__ = "0.4.10"
__path__ = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    missing.__name__ = missing.__qualname__ = name
    return missing
