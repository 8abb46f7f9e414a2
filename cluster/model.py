"""A model that is loaded, in the hands of a client."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cluster.connection import Connection
from cluster.errors import ClusterLost, ConfigError, RankLost, RemoteCallFailed
from cluster.joining.remote_errors import unwrapped
from cluster.reports.report import LoadReport
from storage.errors import LongshoreError

if TYPE_CHECKING:
    import torch


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LoadedModel:
    """Holds a resident model until `release`, the end of the `with` block, or the end of the process.

    with cluster.load("s3://models/llama", tensor_parallel_size=4) as model:
        norms = model.call(lambda shard: float(shard["model.norm.weight"].float().norm()))
    """

    def __init__(self, connection: Connection, model_id: str, report: LoadReport) -> None:
        self.model_id = model_id
        self.report = report
        self._connection = connection
        self._released = False

    @property
    def ends_with_process(self) -> bool:
        """True when this process started the Ray cluster: then the model goes with it, kept or not."""
        return self._connection.local

    @property
    def ranks(self) -> range:
        """Rank numbers: 0 .. world size - 1."""
        report = self.report
        return range(report.layout.ranks)

    def call(self, fn: Callable[..., Any], *args: Any, ranks: list[int] | None = None, **kwargs: Any) -> list[Any]:
        """`fn(shard, *args, **kwargs)` inside every worker (or those of `ranks`); the results in that order.

        `shard` maps tensor names to the rank's own tensors on its device, and has `.rank`, `.coords`, `.slices`.
        `shard.into(module)` fills a torch module with them; what is to stay for later calls goes into `shard.kept`.
        Raises RemoteCallFailed with the function's traceback, RankLost when a worker died.
        """
        wanted = list(self.ranks) if ranks is None else [self._checked_rank(rank) for rank in ranks]
        workers = self._workers()
        return [
            self._get(reference, rank)
            for rank, reference in [
                (rank, workers[rank].call.options(concurrency_group="call").remote(self.model_id, fn, args, kwargs))
                for rank in wanted
            ]
        ]

    async def acall(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`call`, without blocking the event loop."""
        return await asyncio.to_thread(self.call, fn, *args, **kwargs)

    def iter_tensors(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU copy) of each of a rank's tensors, one at a time."""
        import torch

        worker = self._workers()[self._checked_rank(rank)]
        names = self._get(worker.tensor_names.options(concurrency_group="call").remote(self.model_id), rank)
        for name in names:
            asked = worker.tensor_copy.options(concurrency_group="call").remote(self.model_id, name)
            dtype, shape, data = self._get(asked, rank)
            # Copied: what Ray hands out are read-only views of its object store, which is small.
            copy = torch.empty(data.size, dtype=torch.uint8)
            copy.numpy()[:] = data
            yield name, copy.view(getattr(torch, dtype)).reshape(shape)

    def state_dict(self, rank: int) -> dict[str, torch.Tensor]:
        """CPU copies of all of a rank's tensors: for looking and testing, not for serving."""
        return dict(self.iter_tensors(rank))

    async def astate_dict(self, rank: int) -> dict[str, torch.Tensor]:
        """`state_dict`, without blocking the event loop."""
        return await asyncio.to_thread(self.state_dict, rank)

    def release(self) -> None:
        """Give this hold back; memory is freed when nobody else holds the model and it is not kept. Idempotent."""
        if self._released:
            return
        self._released = True
        if self._connection.drop(self.model_id):
            self._connection.call("release", self.model_id, self._connection.client_id)

    async def arelease(self) -> None:
        """`release`, without blocking the event loop."""
        await asyncio.to_thread(self.release)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*(() if kind is None else (LongshoreError,))):  # the block's own error is the news
            self.release()

    async def __aenter__(self) -> LoadedModel:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*(() if kind is None else (LongshoreError,))):
            await self.arelease()

    def __repr__(self) -> str:
        return f"LoadedModel({self.model_id!r}, ranks={len(self.ranks)})"

    def _checked_rank(self, rank: int) -> int:
        if rank not in self.ranks:
            raise ConfigError(f"there is no rank {rank!r:.40}: the model has ranks 0 to {len(self.ranks) - 1}")
        return rank

    def _workers(self) -> list[Any]:
        workers: list[Any] = self._connection.call("workers", self.model_id)
        return workers

    def _get(self, reference: Any, rank: int) -> Any:
        from ray.exceptions import RayActorError, RayError, RaySystemError, RayTaskError, UnserializableException

        try:
            return self._connection.answer(reference)
        except RayTaskError as error:
            cause = unwrapped(error)
            if isinstance(getattr(error, "cause", None), LongshoreError):
                raise cause from None
            # The text of Ray's error is the remote traceback, coloured for a terminal.
            said = _COLOURS.sub("", str(error))
            raise RemoteCallFailed(f"the function raised on rank {rank}:\n{said}", rank=rank) from error
        except UnserializableException as error:  # an exception of the user's that pickle cannot make again
            said = _COLOURS.sub("", str(error))
            raise RemoteCallFailed(f"the function raised on rank {rank}:\n{said}", rank=rank) from error
        except RaySystemError as error:  # how Ray says that pickle could not make the result again
            raise RemoteCallFailed(
                f"the result of rank {rank} cannot be read here",
                hint="return numbers, strings or numpy arrays, or copy tensors out with iter_tensors",
                rank=rank,
                cause=_COLOURS.sub("", str(error)).splitlines()[0][:300],
            ) from error
        except RayActorError as error:
            raise RankLost(
                f"rank {rank} died during the call",
                hint="longshore status shows whether it has been replaced",
                rank=rank,
                model=self.model_id,
            ) from error
        except RayError as error:
            raise ClusterLost("Ray failed under the call", cause=str(error)[:300]) from error
