"""Loaded by a .pth file at the start of each interpreter of the environment: SGLang runs on CPU there.

torchvision's wheel cannot load its compiled operators beside a torch for CPU, and fails where it registers
Python versions of two of them; they are declared just before it is imported. SGLang believes in a CPU when
told so.
"""

import importlib.abc
import os
import sys

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator)
            KEPT.append(self)


KEPT = []
sys.meta_path.insert(0, BeforeTorchvision())
