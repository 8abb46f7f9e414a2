"""What the loader of one of vLLM's workers costs: `worker_extension_cls="bench.contenders.vllm_costs.LoadCosts"`.

A worker imports this module before it loads, and so vLLM's loaders note what they cost in that process. Before the
clock starts, the host's free pages are fetched once more: in the seconds that vLLM takes to start, the host takes back
what was fetched before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from bench.harness.measure import fetch_host_pages

# when `load_model` began, when `load_weights` ended, the CPU seconds between, and the most memory over that of before
Costs = tuple[float, float, float, int]
_costs: list[Costs] = []


class LoadCosts:
    """Methods that vLLM adds to its workers."""

    def load_costs(self) -> Costs:
        """Return the costs of the first model that this worker has loaded."""
        return _costs[0]


def _timed(load_model: Callable[..., Any]) -> Callable[..., Any]:
    def timed(self: Any, *args: Any, **options: Any) -> Any:
        if "load_weights" in vars(self):  # a loader's own `load_model` has called that of vLLM
            return load_model(self, *args, **options)
        fetch_host_pages(int(os.environ["BENCH_LOADED_BYTES"]))
        get_world_group().barrier()  # the workers begin together
        Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted anew (proc(5))
        before_bytes, start_s, start_cpu_s = _memory_bytes("VmRSS"), time.monotonic(), time.process_time()
        load_weights = self.load_weights

        def note(*given: Any) -> None:
            load_weights(*given)
            end_s, cpu_s = time.monotonic(), time.process_time() - start_cpu_s
            _costs.append((start_s, end_s, cpu_s, _memory_bytes("VmHWM") - before_bytes))

        self.load_weights = note
        return load_model(self, *args, **options)

    return timed


for loader in (BaseModelLoader, *BaseModelLoader.__subclasses__()):
    if "load_model" in vars(loader):
        loader.load_model = _timed(loader.load_model)


def _memory_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10
