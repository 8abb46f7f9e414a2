"""Ranks that are killed, or raise, in a save: the revision before stays loadable, and the next save continues."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster.client import list_saves
from tests.support.save_job import full_tensors, run_jobs

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
ROUND = "round 1 of 1"
WRITTEN = ("commit: shards", "commit: files", "commit: index", "commit: manifest")  # every part is in the journal
ALL_DIE_AT = ("begin", ROUND, "write", *WRITTEN, "commit: cleanup")
ONE_DIES_AT = ((2, "begin"), (2, ROUND), (1, "write"), (0, "commit: index"))


def test_the_revision_before_stays_and_the_next_save_continues(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tensors = [full_tensors(0), full_tensors(1)]
    (first,) = run_jobs(tmp_path / "first", [{"uri": str(base)}])
    assert {one.code for one in first} == {0}, first[0].log
    before = first[0].document["revision"]
    cases: list[tuple[str, int | None, dict[str, Any]]] = [(step, None, {"all_die_at": step}) for step in ALL_DIE_AT]
    cases += [(step, rank, {"only": {f"{rank}": {"die_at": step}}}) for rank, step in ONE_DIES_AT]
    cases += [("write", 3, {"only": {"3": {"raise_at": "write"}}})]
    jobs = []
    for number, (_, _, case) in enumerate(cases):
        folder = shutil.copytree(base, tmp_path / f"{number}")
        jobs.append({"uri": str(folder), "seed": 1, "save_timeout_s": 16, **case})
    ended = run_jobs(tmp_path / "killed", jobs)
    for job, (step, lost, case), ranks in zip(jobs, cases, ended, strict=True):
        is_new = step == "commit: cleanup"
        with cluster.safe_open(job["uri"]) as opened:  # verified by the manifest
            assert set(opened.keys()) == set(tensors[is_new])
            for name, tensor in tensors[is_new].items():
                assert opened.get_tensor(name).equal(tensor), (case, name)
        report = cluster.verify(job["uri"], progress=False)
        if step == "commit: manifest":  # the index has no revision in its name, and is written just before
            assert (report.bad_files, report.missing) == (("model.safetensors.index.json",), ()), case
            assert not report.bad_chunks, case
            assert not report.bad_shards, case
        else:
            assert report.ok, case
        assert (report.revision == before) != is_new, case
        for rank, one in enumerate(ranks):
            if lost is None:
                assert one.code == -9, (case, one)
            elif rank != lost:
                assert (one.code, one.error, one.document["rank"]) == (3, "SaveError", lost), (case, one)
            else:
                assert one.code == (4 if "raise_at" in case["only"][f"{lost}"] else -9), (case, one)
    again = run_jobs(tmp_path / "again", [{"uri": job["uri"], "seed": 1} for job in jobs])
    for job, (step, _, case), ranks in zip(jobs, cases, again, strict=True):
        assert {one.code for one in ranks} == {0}, (case, ranks[0])
        document = ranks[0].document
        report = cluster.verify(job["uri"], progress=False)
        assert (report.ok, report.revision) == (True, document["revision"])
        assert sum(document[f"{how}_bytes"] for how in ("written", "reused", "copied")) == document["size_bytes"]
        assert {item.kind for item in list_saves(job["uri"]).leftovers} <= {"file"}, case
        if step in WRITTEN:
            assert document["reused_bytes"] == document["size_bytes"], case
