"""Free memory is the least of what the kernel and the container's limit leave."""

from __future__ import annotations

import pytest

from storage.host_memory import available_host_bytes, free_bytes, is_memory_backed


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "meminfo").write_text("MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:    3000 kB\n")
    return folder


def test_without_a_limit_it_is_what_the_kernel_says(proc, tmp_path):
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


def test_a_kernel_that_does_not_tell(proc, tmp_path):
    (proc / "meminfo").write_text("MemTotal:  4000 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        available_host_bytes(str(proc), str(tmp_path))


def test_this_host_has_memory_and_a_memory_backed_folder():
    assert available_host_bytes() > 0
    assert free_bytes("/dev/shm") > 0
    assert is_memory_backed("/dev/shm")
    assert not is_memory_backed("/proc")
