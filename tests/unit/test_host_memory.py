"""Free memory is the least of what the kernel and the container's limit leave."""

from __future__ import annotations

import gc
import os

import pytest

from storage.host.memory import (
    available_host_bytes,
    free_bytes,
    huge_pages,
    is_memory_backed,
    memory_pools,
    without_collector,
)


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "meminfo").write_text("MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:    3000 kB\n")
    return folder


def test_without_a_limit_the_kernels_value_is_used(proc, tmp_path):
    assert available_host_bytes(str(proc), str(tmp_path / "none")) == 3000 * 1024


@pytest.mark.parametrize(
    ("names", "folder"),
    [
        (("memory.max", "memory.current", "inactive_file"), ""),
        (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), "memory"),
    ],
)
def test_a_container_limit_counts_its_page_cache_as_free(proc, tmp_path, names, folder):
    cgroup = tmp_path / "cgroup" / folder
    cgroup.mkdir(parents=True)
    limit, used, cache = names
    (cgroup / limit).write_text("1000000\n")
    (cgroup / used).write_text("700000\n")
    (cgroup / "memory.stat").write_text(f"anon 5\n{cache} 50000\n")
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 350_000
    (cgroup / used).write_text("2000000\n")
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 0
    (cgroup / limit).write_text("max\n")
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 3000 * 1024


def limited(folder, names, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, cache_name = names
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache_name} {cache}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("names", "root", "said"),
    [
        (V2, "", "0::/pod/container\n"),
        (V2, "unified", "4:memory:/\n0::/pod/container\n"),
        (V1, "memory", "5:cpu,cpuacct:/other\n4:memory:/pod/container\n0::/\n"),
    ],
)
def test_every_enclosing_cgroup_counts(proc, tmp_path, names, root, said):
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text(said)
    top = tmp_path / "cgroup" / root
    limited(top, names, "max", 900_000, 0)
    limited(top / "pod", names, 800_000, 500_000, 0)
    limited(top / "pod/container", names, 600_000, 100_000, 20_000)
    host, container, pod = memory_pools(str(proc), str(tmp_path / "cgroup"))
    assert (host.free_bytes, host.total_bytes) == (3000 * 1024, 4000 * 1024)
    assert (container.free_bytes, container.total_bytes) == (520_000, 600_000)
    assert (pod.free_bytes, pod.total_bytes) == (300_000, 800_000)
    assert len({host.pool_id, container.pool_id, pod.pool_id}) == 3
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 300_000  # the tightest is one further out


def test_a_cgroup_name_may_be_invalid_text(proc, tmp_path):
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_bytes(b"0::/pod\xe3\x83\n")
    limited(tmp_path / "cgroup" / os.fsdecode(b"pod\xe3\x83"), V2, 600_000, 100_000, 0)
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 500_000


@pytest.mark.parametrize("path", ["/system.slice/docker-4711.scope", "/../../kubepods/pod1"])
def test_a_foreign_cgroup_path_falls_back_to_the_mount_root(proc, tmp_path, path):
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text(f"0::{path}\n")
    limited(tmp_path / "cgroup", V2, 1_000_000, 400_000, 0)
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 600_000


def test_a_throttling_limit_counts_as_a_limit(proc, tmp_path):
    limited(tmp_path / "cgroup", V2, 1_000_000, 400_000, 0)
    (tmp_path / "cgroup/memory.high").write_text("700000\n")
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 300_000
    (tmp_path / "cgroup/memory.high").write_text("max\n")
    assert available_host_bytes(str(proc), str(tmp_path / "cgroup")) == 600_000


def test_a_limit_beyond_the_hosts_memory_is_ignored(proc, tmp_path):
    limited(tmp_path / "cgroup/memory", V1, 9_223_372_036_854_771_712, 400_000, 0)
    assert len(memory_pools(str(proc), str(tmp_path / "cgroup"))) == 1


def test_a_missing_kernel_value_is_an_error(proc, tmp_path):
    (proc / "meminfo").write_text("MemTotal:  4000 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        available_host_bytes(str(proc), str(tmp_path))


def test_this_host_has_memory_and_a_memory_backed_folder():
    assert available_host_bytes() > 0
    assert free_bytes("/dev/shm") > 0
    assert is_memory_backed("/dev/shm")
    assert huge_pages("/proc") == "never"


def test_the_mount_says_which_pages_it_has(tmp_path):
    device = os.stat(tmp_path).st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime shared:1 - tmpfs tmpfs rw,size=8k"
    (tmp_path / "self").mkdir()
    for options, found in (("", "never"), (",huge=within_size", "within_size"), (",huge=always,inode64", "always")):
        (tmp_path / "self/mountinfo").write_text(f"1 1 0:0 / / rw - ext4 /dev/a rw,huge=no\n{line}{options}\n")
        assert huge_pages(tmp_path, str(tmp_path)) == found
    assert not is_memory_backed("/proc")


def test_the_last_block_restores_the_collector():
    assert gc.isenabled()
    first, second = without_collector(), without_collector()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
