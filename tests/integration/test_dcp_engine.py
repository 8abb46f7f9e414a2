"""torch.distributed.checkpoint with `LongshoreReader`, beside torch's own reader of the same files."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

import cluster
from cluster.config import Config
from cluster.errors import ConfigError, LayoutError, SaveRefused
from engines.dcp import LongshoreReader, LongshoreWriter
from storage.errors import IntegrityError, ObjectNotFound, RevisionMismatch
from tests.support.counting_proxy import CountingProxy
from tests.support.dcp_job import WORLD, run_job, stored_tensors
from tests.support.gloo_ranks import run_ranks
from tests.support.stored_models import CHUNK_BYTES, StoredModel, publish_to

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_host"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # one process is enough for some
]

SIZES = {"arena_bytes": 32 << 20, "slot_bytes": 1 << 20, "chunk_bytes": CHUNK_BYTES, "window_bytes": 16 << 20}
SETTINGS = Config(**SIZES, group_patience_s=60.0)


@pytest.fixture(scope="module")
def stored(s3_server: Any, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The checkpoint of `dcp_job` in three files."""
    folder = tmp_path_factory.mktemp("dcp")
    tensors = stored_tensors()
    for number in range(3):
        part = {name: tensors[name] for name in list(tensors)[number::3]}
        save_file(part, folder / f"model-{number + 1:05}-of-00003.safetensors")
    return publish_to(s3_server, folder, f"dcp-{os.getpid()}")


def variables(stored: StoredModel, proxy: CountingProxy) -> dict[str, str]:
    keys = stored.server.credentials()
    return {
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "URI": stored.uri,
        "ENDPOINT": proxy.endpoint_url,
        "REGION": stored.server.region,
        "FOLDER": str(stored.folder),
        "SETTINGS": SETTINGS.model_dump_json(exclude_unset=True),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def chunks_read(proxy: CountingProxy) -> list[tuple[str, tuple[int, int]]]:
    read = [(one.path, one.range) for one in proxy.requests() if one.is_weights]
    return [(path, span) for path, span in read if span is not None]


def test_any_placement_is_bit_for_bit_that_of_torch(stored: StoredModel, tmp_path: Path) -> None:
    with CountingProxy(stored.server.endpoint_url) as proxy:
        found = run_job("all", tmp_path, variables(stored, proxy))
        chunks = chunks_read(proxy)
    assert [rank["wrong"] for rank in found] == [[]] * WORLD
    assert len(chunks) == len(set(chunks)) > 0  # each leaves the store once, for all four ranks
    tensors = stored_tensors()
    needed_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name != "unused")
    read_bytes = sum(end - begin for _, (begin, end) in chunks)
    assert needed_bytes <= read_bytes < needed_bytes + 3 * CHUNK_BYTES  # "unused" has almost four chunks
    assert all(rank["report"]["whole_reads"] == 0 for rank in found)
    assert all(rank["report"]["shared"] for rank in found)


def test_a_rank_reads_the_chunks_of_its_slice_only(stored: StoredModel, tmp_path: Path) -> None:
    with CountingProxy(stored.server.endpoint_url) as proxy:
        found = run_job("alone", tmp_path, variables(stored, proxy))
        chunks = chunks_read(proxy)
    assert [rank["wrong"] for rank in found] == [[]] * WORLD
    slice_bytes = stored_tensors()["rows"].chunk(WORLD)[-1].nbytes
    assert found[-1]["report"]["read_bytes"] == slice_bytes
    assert len(chunks) <= slice_bytes // CHUNK_BYTES + 2


@pytest.mark.parametrize("case", ["save", "save in the background"])
def test_ranks_save_a_checkpoint_that_others_load(stored: StoredModel, tmp_path: Path, case: str) -> None:
    with CountingProxy(stored.server.endpoint_url) as proxy:
        more = {"SAVED": str(tmp_path / "saved")}
        found = run_job(case, tmp_path, {**variables(stored, proxy), **more})
    assert [rank["wrong"] for rank in found] == [[]] * WORLD
    with cluster.safe_open(tmp_path / "saved", config=SETTINGS) as opened:
        assert {opened.revision} == {rank["revision"] for rank in found}
        assert opened.keys() == sorted(set(stored_tensors()) - {"unused"})


def test_a_state_dict_with_other_objects_is_refused(tmp_path: Path) -> None:
    writer = LongshoreWriter(tmp_path / "saved")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"weight": torch.ones(3), "step": 5}, storage_writer=writer, no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, SaveRefused)
    assert "step" in str(error)
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with cluster.safe_open(tmp_path / "saved") as opened:
        assert torch.equal(opened.get_tensor("weight"), torch.ones(3))


class Casting(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object).half()


class Dropping(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[item for item in plan.items if item.index.fqn != "weight"])
        return self.plan


class Renaming(DefaultSavePlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"model.{name}": each for name, each in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


@pytest.mark.parametrize(("planner", "own"), [(Casting, "transform_object"), (Dropping, "create_local_plan")])
def test_a_planner_that_changes_the_save_is_refused(tmp_path: Path, planner: Any, own: str) -> None:
    """Its work would be lost without a word. One that renames is taken."""
    writer, state = LongshoreWriter(tmp_path / "saved"), {"weight": torch.ones(3)}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, planner=planner(), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, SaveRefused)
    assert f"{planner.__name__} has {own} of its own" in str(error)
    dcp.save(state, storage_writer=writer, planner=Renaming(), no_dist=True)
    with cluster.safe_open(tmp_path / "saved", config=SETTINGS) as opened:
        assert opened.keys() == ["model.weight"]


def test_a_writer_of_another_group_is_refused_at_once(tmp_path: Path) -> None:
    (*refused, same, single), others = run_ranks(2, "tests.support.saving_ranks:save_alone", str(tmp_path / "saved"))
    for error in refused:
        assert error.startswith("SaveRefused: dcp.save has 1 ranks, and the group of the writer has 2")
        assert "process_group" in error
    assert [same, single, *others] == ["", ""]


class Rebuilding(DefaultLoadPlanner):
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [LoadPlan(plan.items) for plan in global_plan]


def test_a_planner_that_makes_new_plans_reads_alone(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    state = {"weight": torch.zeros(3)}
    dcp.load(state, storage_reader=LongshoreReader(tmp_path, settings=SETTINGS), planner=Rebuilding(), no_dist=True)
    assert torch.equal(state["weight"], torch.ones(3))


def test_ranks_that_find_different_revisions_say_so(tmp_path: Path) -> None:
    plans = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        save_file({"weight": torch.full((3,), number)}, tmp_path / str(number) / "model.safetensors")
        cluster.publish(tmp_path / str(number))
        reader = LongshoreReader(tmp_path / str(number), settings=SETTINGS)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    assert len(reader.prepare_global_plan([plans[1]] * 2)) == 2
    with pytest.raises(RevisionMismatch, match="different revisions"):
        reader.prepare_global_plan(plans)


def test_one_process_and_a_model_that_was_not_published(tmp_path: Path) -> None:
    tensors = stored_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    reader = LongshoreReader(tmp_path, settings=SETTINGS)
    for name in ("both", "whole"):  # one reader loads several times
        state = {name: torch.zeros_like(tensors[name]).T.contiguous().T}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(state[name], tensors[name])
    assert reader.report["read_bytes"] == tensors["whole"].nbytes
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "model.safetensors", no_dist=True)
    assert torch.equal(state["whole"], tensors["whole"])


def load_error(reader: LongshoreReader, state: dict[str, Any]) -> BaseException:
    """Return the error of the only rank."""
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, no_dist=True)
    (failure,) = caught.value.failures.values()
    return failure[0]


def test_flipped_bits_are_an_error(tmp_path: Path) -> None:
    tensors = stored_tensors()
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    cluster.publish(tmp_path, chunk_bytes=CHUNK_BYTES)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    reader = LongshoreReader(tmp_path, settings=SETTINGS)
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert isinstance(load_error(reader, state), IntegrityError)


def test_typed_errors(tmp_path: Path) -> None:
    import json
    import struct

    header = json.dumps({"packed": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(8)))
    reader = LongshoreReader(tmp_path, settings=SETTINGS)
    error = load_error(reader, {"packed": torch.zeros(2, 4)})
    assert isinstance(error, LayoutError)
    assert "uint8" in str(error)
    state = {"packed": torch.zeros(2, 4, dtype=torch.uint8)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["packed"].flatten().tolist() == list(range(8))
    missing = LongshoreReader(tmp_path / "nothing", settings=SETTINGS)
    with pytest.raises(ObjectNotFound):
        missing.read_metadata()
    assert "nothing" in str(load_error(missing, state))  # as text: torch wraps what `read_metadata` raises
    with pytest.raises(ConfigError, match="anonymous"):
        LongshoreReader(tmp_path, anonymous="yes")  # type: ignore[arg-type]
