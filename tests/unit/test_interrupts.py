"""SIGTERM becomes an exception, and the previous handlers are restored afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.joining.patience import Terminated, sigterm_interrupts, sigterm_kept
from tests.support.checkpoints import write_tiny_llama


@pytest.fixture(autouse=True)
def handler_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_raised_and_the_handler_restored() -> None:
    def mine(*_: Any) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    with pytest.raises(Terminated), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is mine


def test_an_exit_by_rays_handler_ends_as_terminated() -> None:
    def join_and_be_ended() -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated), sigterm_interrupts():
        join_and_be_ended()
    with pytest.raises(SystemExit), sigterm_interrupts():
        sys.exit(3)


def test_sigterm_in_a_ray_call_ends_as_terminated() -> None:
    def be_ended_in_a_call() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as ray.get does

    with pytest.raises(Terminated), sigterm_interrupts():
        be_ended_in_a_call()
    with pytest.raises(KeyboardInterrupt) as ctrl_c, sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    assert not isinstance(ctrl_c.value, Terminated)


def test_ignored_sigterm_and_other_threads_are_untouched() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    seen: list[Any] = []

    def elsewhere() -> None:
        with sigterm_interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "inter")]
)
def test_an_ended_command_leaves_no_manifest(tmp_path: Path, number: signal.Signals, code: int, said: str) -> None:
    write_tiny_llama(tmp_path / "llama")
    program = (
        "import sys, time, cluster.publishing as publishing\n"
        "from cluster.command_line.cli import main\n"
        "publish = publishing.publish\n"
        "def slow(*args, progress, **options):\n"
        "    def told(moment):\n"
        "        print('reading', flush=True)\n"
        "        time.sleep(0.5)\n"
        "    return publish(*args, progress=told, **options)\n"
        "publishing.publish = slow\n"
        "sys.exit(main(['publish', sys.argv[1]]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "llama")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, said in err) == (code, True), err
    assert not (tmp_path / "llama" / "longshore.manifest.json").exists()


def test_sigterm_kept_restores_the_handler_ray_replaces() -> None:
    def mine(*_: Any) -> None: ...

    def rays(*_: Any) -> None: ...

    for before, after in ((mine, mine), (signal.SIG_IGN, signal.SIG_IGN), (signal.SIG_DFL, rays)):
        signal.signal(signal.SIGTERM, before)
        with sigterm_kept():
            signal.signal(signal.SIGTERM, rays)
        assert signal.getsignal(signal.SIGTERM) is after


def test_a_second_ctrl_c_prints_no_traceback() -> None:
    """The signal arrives while an interrupted process leaves the cluster, in its exit handlers."""
    code = (
        "import atexit, os, signal, sys, time; from cluster import client; from longshore.main import main\n"
        "def status(address): os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n"
        "client.status = status\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(30)))\n"
        "sys.exit(main(['status']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "longshore: interrupted\n")
