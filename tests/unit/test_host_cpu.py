"""Processor time of this process and of the host."""

from __future__ import annotations

import time

from storage.host.processes import CpuClock, usable_cpus


def test_work_of_the_process_is_counted():
    clock = CpuClock()
    while clock.process_s() < 0.2:
        sum(range(10000))
    assert 0.0 < clock.host_busy() <= 1.0
    assert usable_cpus() >= 1


def test_sleep_uses_no_processor_time():
    clock = CpuClock()
    time.sleep(0.05)
    assert clock.process_s() < 0.05
    assert 0.0 <= clock.host_busy() <= 1.0
