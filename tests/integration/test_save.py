"""`cluster.save` by four ranks over Gloo: the same files as safetensors writes, and models that others load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import cluster
from cluster.errors import SaveRefused
from storage.checkpoints.checkpoint import open_model
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.open_store import open_store
from tests.support.free_ports import free_ports
from tests.support.gloo_ranks import run_ranks
from tests.support.s3_servers import make_bucket, server_ref
from tests.support.save_job import full_tensors, llama, run_job, run_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def file_of(tensors: dict[str, torch.Tensor], folder: Path) -> bytes:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "expected", {"format": "pt"})
    return (folder / "expected").read_bytes()


def test_any_mixture_of_layouts_is_saved_bit_by_bit(tmp_path: Path) -> None:
    """Also: a second save with larger tensors and fewer slots holds no more bytes of other ranks."""
    large = {"uri": str(tmp_path / "large"), "scale": 10, "slots": 2}
    first, second = run_jobs(tmp_path / "jobs", [{"uri": str(tmp_path / "model"), "slots": 2}, large])
    for ended in (*first, *second):
        assert ended.code == 0, (ended.document, ended.log)
    for folder, scale in (("model", 1), ("large", 10)):
        full = full_tensors(0, scale)
        index = open_model(open_store(server_ref_of(tmp_path / folder)))
        assert {tensor.name for tensor in index.tensors} == set(full)
        for number, shard in enumerate(index.shards):
            names = [tensor.name for tensor in index.tensors if tensor.shard == number]
            expected = file_of({name: full[name] for name in names}, tmp_path)
            assert (tmp_path / folder / shard.key).read_bytes() == expected
        assert cluster.verify(str(tmp_path / folder)).ok
    report, other = first[0].document, second[0].document
    assert report["tied"] == {"tied": "rows"}
    assert report["written_bytes"] == report["size_bytes"]
    assert other["size_bytes"] > 2 * report["size_bytes"]
    assert 0 < other["peak_foreign_bytes"] <= 2 * 2 * (7 << 20)  # slots, each with its part and its messages
    assert other["peak_foreign_bytes"] < other["size_bytes"] / 4


def server_ref_of(folder: Path) -> Any:
    from storage.store_ref import parse_uri

    return parse_uri(str(folder))


def test_scalars_on_a_mesh_are_saved(tmp_path: Path) -> None:
    run_ranks(2, "tests.support.saving_ranks:save_scalars", str(tmp_path))


def test_the_sharded_state_of_fsdp1_is_saved(tmp_path: Path) -> None:
    assert run_ranks(2, "tests.support.saving_ranks:save_fsdp1", str(tmp_path)) == [["ShardedTensor"]] * 2


def test_a_save_takes_the_same_memory_beside_a_model_ten_times_as_large(tmp_path: Path) -> None:
    peaks = []
    for scale in (5, 50):  # of each rank 18 MB and 175 MB
        peaks.append(max(run_ranks(2, "tests.support.saving_ranks:save_measured", str(tmp_path / "m"), scale=scale)))
        shutil.rmtree(tmp_path / "m")
    assert peaks[1] - peaks[0] < 60_000_000, peaks


def test_a_model_of_fsdp2_and_tp_is_loaded_by_others(tmp_path: Path) -> None:
    import transformers

    ended = run_job(tmp_path / "jobs", str(tmp_path / "model"), case="llama")
    assert [one.code for one in ended] == [0] * 4, [(one.document, one.log) for one in ended]
    model, _ = llama()
    expected = model.state_dict()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert ended[0].document["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    with cluster.safe_open(str(tmp_path / "model")) as opened:
        for name in opened.keys():  # noqa: SIM118
            assert torch.equal(opened.get_tensor(name), expected[name]), name
    (file,) = (tmp_path / "model").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == {name for name in expected if name != "lm_head.weight"}


def test_ranks_write_parts_of_one_object_in_s3(
    tmp_path: Path, rclone: EmbeddedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone.secret_access_key)
    make_bucket(rclone, "saved")
    job = {"uri": "s3://saved/model", "endpoint_url": rclone.endpoint_url}
    first, second = run_jobs(tmp_path / "jobs", [job, {**job, "seed": 1}])
    assert [one.code for one in (*first, *second)] == [0] * 8, [(one.document, one.log) for one in (*first, *second)]
    with closing(open_store(server_ref(rclone, "saved/model"), rclone.credentials())) as store:
        index = open_model(store)
        got: dict[str, torch.Tensor] = {}
        for shard in index.shards:
            copy = tmp_path / shard.key  # a file for each, as the tensors are maps of it
            copy.write_bytes(read_bytes(store, shard.key, ByteRange(0, shard.size_bytes)))
            got |= load_file(copy)
    sent = [one.document["sent"] for one in second]
    for shard in index.shards:
        parts = [number for by_key in sent for number in by_key.get(shard.key, ())]
        assert sorted(parts) == list(range(1, len(parts) + 1)), "each part once"
        assert sum(shard.key in by_key for by_key in sent) > 1, "from several ranks"
    assert all(sent)
    assert index.revision == second[0].document["revision"] != first[0].document["revision"]
    for name, tensor in full_tensors(1).items():
        assert torch.equal(got[name], tensor), name


_PLAIN_RANK = """
import sys, torch, cluster
uri, rank = sys.argv[1], int(sys.argv[2])
common = {"rank": rank, "world_size": 2, "save_timeout_s": 120.0}
state = {"a": torch.arange(7.0), ["b", "c"][rank]: torch.ones(3) * rank}
module = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(module.parameters())

def refused(call, ranks):
    "Return what a rank raises when some ranks alone are refused."
    try:
        call()
    except cluster.errors.SaveRefused as error:
        assert rank in ranks, error
    except cluster.errors.SaveError as error:
        assert rank not in ranks and error.details["rank"] in ranks, error
    else:
        raise SystemExit("not refused")

refused(lambda: cluster.save(state, uri, extra_state={"x": object() if rank else 1}, **common), [1])
refused(lambda: cluster.asave(state, uri, optimizer=None if rank else optimizer, **common), [0])
clash = {"a": torch.ones(2), "_orig_mod.a": torch.ones(2)}
refused(lambda: cluster.asave(state if rank else clash, uri, **common), [0, 1])
refused(lambda: cluster.save(state, uri, model=module, optimizer=optimizer if rank else None, **common), [0, 1])
refused(lambda: cluster.asave(state, uri, model=module, optimizer=optimizer if rank else None, **common), [0, 1])
for step, save in enumerate([cluster.save, lambda *a, **o: cluster.asave(*a, **o).result(timeout_s=60)]):
    save(state, uri, extra_state=None if rank else {"step": step}, **common)
    assert cluster.load_training_state(uri) == {"step": step}
assert not torch.distributed.is_initialized()
"""


def test_ranks_without_a_process_group_meet_at_the_address_of_torchrun(tmp_path: Path) -> None:
    """Also: what one rank alone refuses ends this save for all, and no later one."""
    (port,) = free_ports(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    uri = str(tmp_path / "model")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PLAIN_RANK, uri, str(rank)],
            env={**os.environ, **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            _, log = process.communicate(timeout=400)
            assert process.returncode == 0, log
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert cluster.verify(uri, progress=False).ok
    with cluster.safe_open(uri) as opened:
        assert sorted(opened.keys()) == ["a", "b", "c"]
        assert torch.equal(opened.get_tensor("c"), torch.ones(3))


def test_tensors_of_the_extra_state_are_those_of_rank_0(tmp_path: Path) -> None:
    ranks = run_ranks(2, "tests.support.saving_ranks:save_own_states", str(tmp_path / "model"))
    assert ranks == [[[0, [0.0], [1.0], [0.0, 1.0, 2.0, 3.0, 4.0], [3]]] * 2] * 2


def test_copies_of_all_ranks_of_a_host_must_fit(tmp_path: Path) -> None:
    """One rank's copy would fit in either case."""
    for room_bytes, missing_bytes in ((6000, 2300), (9000, None)):
        ranks = run_ranks(2, "tests.support.saving_ranks:save_with_room", str(tmp_path / "m"), room_bytes=room_bytes)
        assert [found.get("missing_bytes") for found in ranks] == [missing_bytes] * 2
        assert (tmp_path / "m").exists() == (missing_bytes is None)


def test_replicas_that_differ_are_refused_by_name_and_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(3, "tests.support.saving_ranks:save_drifted", str(tmp_path / "model"))
    refusal = (
        "ranks hold other values of the same tensors, which would be mixed: 'bn.running_mean' differs between rank 0 "
        "and rank 1 and rank 2; 'large' differs between ranks 0, 2 and rank 1; 'replicated' differs between ranks 0, 2 "
        "and rank 1"
    )
    assert ranks == [[["", refusal]] * 2] * 3
    assert not list((tmp_path / "model").glob("training/*"))


def test_ranks_that_cannot_meet_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(SaveRefused, match="MASTER_ADDR"):
        cluster.save({"a": torch.ones(2)}, tmp_path / "model", rank=0, world_size=2)
    with pytest.raises(SaveRefused, match="rank is 2"):
        cluster.save({"a": torch.ones(2)}, tmp_path / "model", rank=2, world_size=2)
    assert cluster.save({"a": torch.ones(2)}, tmp_path / "model", rank=0, world_size=1).world_size == 1


def test_arguments_that_differ_on_two_ranks_are_named(tmp_path: Path) -> None:
    """Also: a rank outside the group is refused at once, and the next save of the same ranks is not disturbed."""
    ranks = run_ranks(2, "tests.support.saving_ranks:refused_saves", str(tmp_path / "model"))
    for each in zip(*ranks, strict=True):
        assert all(seconds < 55 for _, _, seconds in each), each  # less than any of the limits
    since, with_state, limit, outside = zip(*[[one[:2] for one in found] for found in ranks], strict=True)
    for same, name in ((since, "since"), (with_state, "since"), (limit, "save_timeout_s")):
        assert (
            same[0] == same[1] == ["SaveRefused", f"this cannot be saved: rank 1: {name} differs from that of rank 0"]
        )
    assert outside == (["", ""], ["SaveRefused", "rank 1 is not in process_group"])
    assert not list((tmp_path / "model").glob("training/*"))


@pytest.mark.parametrize("background", [False, True])
def test_every_problem_of_every_rank_is_one_error(tmp_path: Path, background: bool) -> None:
    """Also of tensors that cannot be copied, such as those of the meta device: they are refused before a copy."""
    job = {"case": "partial", "background": background, "only": {"2": {"slots": 3}}}
    ended = run_job(tmp_path / "jobs", str(tmp_path / "model"), **job)
    assert {(one.code, one.error) for one in ended} == {(3, "SaveRefused")}, [one.log for one in ended]
    (message,) = {one.document["message"] for one in ended}
    for part in (
        "'sum' is Partial over a mesh",
        "rank 1: 'y' is no tensor but str",
        "rank 1: 'conj' is a lazy conjugate",
        "rank 1: 'meta' is on the meta device",
        "rank 1: 'sparse' is no dense tensor",
        "slots differs",
        "'x' has another dtype or shape on some ranks",
    ):
        assert part in message
    assert not list(tmp_path.glob("model/*"))


def test_sums_that_are_not_made_have_no_boxes(tmp_path: Path) -> None:
    (message,) = run_ranks(1, "tests.support.saving_ranks:boxes_of_sums")
    assert message.startswith("'w' is Partial over a mesh")
