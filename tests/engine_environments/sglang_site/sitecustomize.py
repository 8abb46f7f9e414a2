"""Lets torchvision's build for GPUs be imported beside torch's build for processors, as SGLang imports it.

Python runs this module when its folder is in PYTHONPATH. The operators are declared, and have no code.
"""

import sys
from importlib.abc import MetaPathFinder


class Declare(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", schema)
        return None


sys.meta_path.insert(0, Declare())
