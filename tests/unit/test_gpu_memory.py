"""Facts about GPUs from the driver: a library with NVML's interface, and the output of its command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from storage.host.memory import GpuDriver, GpuMemory, gpu_driver, gpu_memory

GIB = 1 << 30
STAND_IN = """
typedef struct { unsigned long long total, free, used; } memory_t;
static int opened = 0;
int nvmlInit_v2(void) { opened++; return %(init)d; }
int nvmlShutdown(void) { opened--; return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = %(count)s; return opened == 1 ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = (void *)(index + 7ull); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    unsigned long long index = (unsigned long long)device - 7;
    memory->total = 24ull << 30; memory->free = (20ull + index) << 30; memory->used = 0;
    return opened == 1 ? 0 : 2;
}
int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    const char *version = "580.95.05";
    for (unsigned int at = 0; at < length; at++) { text[at] = version[at]; if (!version[at]) break; }
    return opened == 1 ? 0 : 2;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13010; return opened == 1 ? 0 : 2; }
"""


@pytest.fixture
def no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def library(folder: Path, init: int = 0, count: str = "2") -> str:
    compiler = shutil.which("cc", path="/usr/bin:/usr/local/bin:/bin")
    if compiler is None:
        pytest.skip("no C compiler")
    source, made = folder / "nvml.c", folder / f"libnvml-{init}-{count}.so"
    source.write_text(STAND_IN % {"init": init, "count": count})
    path = os.environ["PATH"] + ":/usr/bin:/bin"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True, env={**os.environ, "PATH": path})
    return str(made)


def test_the_drivers_library_reports_each_gpu(tmp_path: Path, no_command: Path) -> None:
    made = library(tmp_path)
    for _ in range(2):  # closed each time
        assert gpu_memory(made) == (GpuMemory(24 * GIB, 20 * GIB), GpuMemory(24 * GIB, 21 * GIB))


@pytest.mark.parametrize("broken", [{"init": 9}, {"count": "4000000000u"}])
def test_a_library_that_fails_reports_no_gpu(tmp_path: Path, no_command: Path, broken: dict[str, object]) -> None:
    assert gpu_memory(library(tmp_path, **broken)) == ()  # type: ignore[arg-type]


def test_without_a_driver_there_is_no_gpu(no_command: Path) -> None:
    assert gpu_memory("libno-such-driver.so") == ()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("24576, 20480\n24576, 24000\n", (GpuMemory(24 * GIB, 20 * GIB), GpuMemory(24 * GIB, 24000 << 20))),
        ("24576, [N/A]\n", (GpuMemory(24 * GIB, None),)),
        ("24576\n", (GpuMemory(24 * GIB, None),)),
        ("[N/A], [N/A]\n", ()),
        ("", ()),
    ],
)
def test_the_output_of_the_drivers_command_is_read(no_command: Path, said: str, meant: tuple[GpuMemory, ...]) -> None:
    command = no_command / "nvidia-smi"
    command.write_text("#!/bin/sh\nprintf '" + said.replace("\n", "\\n") + "'\n")
    command.chmod(0o755)
    assert gpu_memory("libno-such-driver.so") == meant


def test_driver_and_cuda_versions_are_read(tmp_path: Path, no_command: Path) -> None:
    assert gpu_driver(library(tmp_path)) == GpuDriver("580.95.05", "13.1")
    assert gpu_driver(library(tmp_path, init=9)) is None
    assert gpu_driver("libno-such-driver.so") is None
