"""Stands in for Triton: its kernels can be defined, not launched. Saves a gigabyte.

Whatever is asked for, here or in a submodule, is a class whose calls give their only argument back where that
is a function (a decorator), and an object of no content else.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.6.0"
__path__ = []


class Kernel:
    """What `jit` makes of a function."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = None
        self.src = ""
        self.arg_names = []

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"the Triton kernel {self.__name__} needs a GPU")


def jit(function=None, **options):
    return Kernel if function is None else Kernel(function)


def autotune(*args, **kwargs):
    return lambda kernel: kernel


heuristics = autotune


def cdiv(numerator, denominator):
    return -(-numerator // denominator)


def next_power_of_2(number):
    return 1 << (max(int(number), 1) - 1).bit_length()


class Config:
    def __init__(self, kwargs=None, **options):
        self.kwargs = kwargs or {}
        self.__dict__.update(options)


class Anything(type):
    """Class of classes that have every attribute, each again such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __call__(cls, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return object.__new__(cls)


def anything(name):
    return Anything(name, (), {})


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return anything(name)


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module below triton."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__
        if spec.name == "triton.language":
            module.constexpr = anything("constexpr")
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Submodules())
from triton import language  # noqa: E402, F401
