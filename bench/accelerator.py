"""What the GPU case needs of a device: with CUDA, and on the host so that all the rest can be run without a GPU."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from bench.contender import NotRunnable


class Copies(Protocol):
    """A queue of copies from host to device, which run in their order."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy `source` (pinned) to `target` (on the device); may return before it is done."""
        ...

    def mark(self) -> Any:
        """A mark behind all copies so far, for `wait`."""
        ...

    def wait(self, mark: Any) -> None:
        """Return when everything before the mark is done."""
        ...


class Accelerator(Protocol):
    """A device, with torch's name for it."""

    name: str

    def describe(self) -> dict[str, str]: ...

    def warm_up(self) -> None:
        """Everything that a first use costs: context, libraries."""
        ...

    def host(self, size_bytes: int) -> Any:
        """Host memory that the device copies from by itself, as a tensor of bytes."""
        ...

    def device(self, size_bytes: int) -> Any:
        """Memory of the device, as a tensor of bytes."""
        ...

    def copies(self) -> Copies: ...

    def synchronize(self) -> None:
        """Return when the device has nothing left to do."""
        ...

    def used_bytes(self) -> int:
        """Device memory that is taken, by whomever."""
        ...


def open_accelerator(kind: str) -> Accelerator:
    """`kind`: "cuda" or "cpu". Raises NotRunnable where there is no such device."""
    return _Cuda() if kind == "cuda" else _Host()


class _Cuda:
    name = "cuda:0"

    def __init__(self) -> None:
        import torch

        if torch.version.cuda is None:
            raise NotRunnable(f"no CUDA: torch {torch.__version__} is built without it")
        if not torch.cuda.is_available():
            raise NotRunnable(f"no CUDA device: torch {torch.__version__} finds no GPU that it can use")
        self._torch = torch
        torch.cuda.set_device(0)

    def describe(self) -> dict[str, str]:
        torch = self._torch
        return {
            "gpu": torch.cuda.get_device_name(0),
            "gpu memory": f"{torch.cuda.mem_get_info(0)[1] / 1e9:.0f} GB",
            "cuda": str(torch.version.cuda),
        }

    def warm_up(self) -> None:
        torch = self._torch
        # Both directions and a pinned allocation once: the context, and the libraries that are loaded on first use.
        self.host(1 << 20).to(self.name, non_blocking=True).add_(1).cpu()
        torch.cuda.synchronize(0)

    def host(self, size_bytes: int) -> Any:
        return self._torch.empty(size_bytes, dtype=self._torch.uint8, pin_memory=True)

    def device(self, size_bytes: int) -> Any:
        return self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self.name)

    def copies(self) -> Copies:
        return _CudaCopies(self._torch)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(0)

    def used_bytes(self) -> int:
        free_bytes, total_bytes = self._torch.cuda.mem_get_info(0)
        return int(total_bytes - free_bytes)


class _CudaCopies:
    """A stream of its own. Targets must be memory that no other stream has in use."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream(device=0)

    def copy(self, target: Any, source: Any) -> None:
        with self._torch.cuda.stream(self._stream):  # of the calling thread only
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        mark.synchronize()


class _Host:
    """No accelerator: its memory is the host's and every copy is done at once."""

    name = "cpu"

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def describe(self) -> dict[str, str]:
        return {"gpu": "none: a dry run on the host, its stats say nothing of a GPU"}

    def warm_up(self) -> None:
        pass

    def host(self, size_bytes: int) -> Any:
        return self._torch.empty(size_bytes, dtype=self._torch.uint8)

    def device(self, size_bytes: int) -> Any:
        return self.host(size_bytes)

    def copies(self) -> Copies:
        return _HostCopies()

    def synchronize(self) -> None:
        pass

    def used_bytes(self) -> int:
        return 0


class _HostCopies:
    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def mark(self) -> Any:
        return contextlib.nullcontext()

    def wait(self, mark: Any) -> None:
        pass
