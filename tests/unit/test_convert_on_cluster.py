"""Workers of a conversion that are lost, on a Ray of this file's own. `fault/test_lost_nodes.py` has the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster
from actors.saving import on_cluster
from actors.saving.conversion import Conversion, Place
from actors.saving.on_cluster import MAX_LOSSES, ConvertWorker
from cluster.converting.source import SourceTensor, StoredPiece
from cluster.messages import pack_message
from cluster.request import StoreOptions
from storage.publishing import saves

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


class RayError(Exception):
    """An actor is gone."""


class RayTaskError(RayError):
    """A call raised."""


class TinyRay:
    """Calls run when their answers are fetched, one after another. `dies` says which of them kill their actor."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, dies: Callable[[str, str, tuple[Any, ...]], bool]) -> None:
        self.dies = dies
        self.killed: list[Any] = []
        self.begun: list[str] = []  # node of each actor that was started

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "NodeManagerHostname": name, "Alive": True} for name in ("n1", "n2", "n3")]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="127.0.0.1:1")

    def put(self, value: Any) -> Any:
        return value

    def remote(self, actor_class: type) -> Any:
        return SimpleNamespace(options=lambda scheduling_strategy, **_: self._maker(actor_class, scheduling_strategy))

    def _maker(self, actor_class: type, strategy: Any) -> Any:
        def make() -> Any:
            real, node, gone = actor_class(), strategy.node_id, []
            self.begun.append(node)

            def method(name: str) -> Any:
                def call(*arguments: Any) -> Any:
                    def run() -> Any:
                        if gone or self.dies(name, node, arguments):
                            gone.append(True)
                            raise RayError(f"the actor on {node} died")
                        return getattr(real, name)(*arguments)

                    return run

                return SimpleNamespace(remote=call)

            return SimpleNamespace(begin=method("begin"), make=method("make"))

        return SimpleNamespace(remote=make)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        return reference()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Convert a model of 8 parts on a Ray where some calls kill their actor. It returns the report and the Ray."""
    monkeypatch.setattr(saves, "MIN_PAUSE_S", 0.0)  # the journal is written after every part
    monkeypatch.setattr(saves, "PAUSE_PER_WRITE", 0.0)
    torch.save({"w": torch.arange(12_000_000, dtype=torch.float32)}, tmp_path / "model.pt")

    def run(dies: Callable[[str, str, tuple[Any, ...]], bool]) -> Any:
        ray = TinyRay(dies)
        launch = SimpleNamespace(diagnosed=lambda error, what: cluster.ClusterError(what))
        monkeypatch.setattr(on_cluster, "join_cluster", lambda address: (ray, launch))
        monkeypatch.setattr(on_cluster, "only_on", lambda node: SimpleNamespace(node_id=node["NodeID"]))
        monkeypatch.setattr(on_cluster, "HeadWatch", lambda *_: SimpleNamespace(close=lambda: None))
        options: dict[str, Any] = {"on_cluster": True, "chunk_bytes": 1 << 20, "progress": False}
        try:
            report = cluster.convert(tmp_path / "model.pt", tmp_path / "out", **options)
            (file,) = (tmp_path / "out").glob("*.safetensors")
            assert load_file(file)["w"].equal(torch.arange(12_000_000, dtype=torch.float32))
        finally:
            assert len({id(actor) for actor in ray.killed}) == len(ray.begun), "an actor was left"
        return report, ray

    return run


def test_parts_of_lost_workers_are_made_by_others(convert: Callable[..., Any]) -> None:
    seen: set[Any] = set()

    def dies(method: str, node: str, arguments: tuple[Any, ...]) -> bool:
        """The node n2 has never a worker for long, and others lose the workers of two parts, once."""
        first = arguments not in seen
        seen.add(arguments)
        return node == "n2" or (method == "make" and arguments[0] in {(0, 1), (0, 5)} and first)

    report, ray = convert(dies)
    assert (report.workers, report.verified) == (3, True)
    assert report.written_bytes >= report.size_bytes
    assert ray.begun[:3] == ["n1", "n2", "n3"]
    assert ray.begun.count("n2") <= 3, "other nodes are tried first"


def test_part_that_kills_every_worker_ends_the_conversion(convert: Callable[..., Any], tmp_path: Path) -> None:
    def dies(method: str, node: str, arguments: tuple[Any, ...]) -> bool:
        return method == "make" and arguments[0] == (0, 3)

    with pytest.raises(cluster.SaveError, match=f"lost with {MAX_LOSSES} workers"):
        convert(dies)
    assert not list((tmp_path / "out").glob("longshore.manifest.json"))
    report, _ = convert(lambda *_: False)
    assert report.reused_bytes > 0


def test_workers_that_never_start_end_the_conversion(convert: Callable[..., Any]) -> None:
    with pytest.raises(cluster.ClusterError, match="could not start"):
        convert(lambda method, node, arguments: method == "begin")


def test_workers_of_a_cluster_check_that_they_see_both_folders(tmp_path: Path) -> None:
    """As on a node without the shared file system."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "model.pt")
    conversion = Conversion((), {"w": SourceTensor("w", "F32", (), (StoredPiece("model.pt", 0, (), ()),))}, {})
    seen, unseen = (Place(StoreOptions().resolve(tmp_path / name, new=True)[0], None) for name in ("", "nowhere"))
    plan = pack_message((conversion, None))
    for places, uri in (((unseen, seen), "nowhere"), ((seen, unseen), "nowhere"), ((seen, seen), "")):
        with pytest.raises(cluster.ConfigError, match=rf"node n7 does not see .*/{uri}"):
            ConvertWorker().begin(pack_message(places), plan, "n7")
    with pytest.raises(cluster.ConfigError, match="on_cluster=True"):
        cluster.convert(tmp_path / "model.pt", tmp_path / "out", address="127.0.0.1:1", progress=False)
    with pytest.raises(cluster.ClusterLost):
        cluster.convert(tmp_path / "model.pt", tmp_path / "out", on_cluster=True, address="127.0.0.1:1")
    assert not (tmp_path / "out").exists()
