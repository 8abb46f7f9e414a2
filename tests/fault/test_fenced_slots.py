"""Real processes on a real arena: stopped past their deadline, killed in mid-write, killed as the agent."""

from __future__ import annotations

import os
import signal
import time

import pytest

from storage.arena.arena import Arena
from storage.arena.arena_files import arena_path, sweep
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Answer, SlotState
from storage.host.processes import ProcessId, processes_mapping
from tests.support.python_processes import ask, start_python

SLOT = 1 << 20
A, B = b"a" * 32, b"b" * 32

# Fills its slot again and again, as a writer does that knows nothing of its deadline.
WRITER = """
import sys
from storage.arena.arena import Arena
path, index, letter = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
arena = Arena.open(path)
slot = arena.slot(index)
print("writing", flush=True)
while True:
    for start in range(0, len(slot), 4096):
        slot[start:start + 4096] = letter * 4096
"""

# An agent: leases one slot to the process named, commits another, then waits to be killed.
AGENT = """
import sys
from storage.arena.arena import Arena
from storage.arena.chunk_cache import ChunkCache
from storage.host.processes import ProcessId
path, pid, start_time = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
worker = ProcessId(pid, start_time)
arena = Arena.create(path, slot_count=3, slot_bytes=1 << 20)
arena.reserve()
cache = ChunkCache(3, journal=arena)
done = cache.lease(b"a" * 32, worker, 10)
arena.slot(done.slot)[:] = b"a" * (1 << 20)
cache.commit(done.lease_id, 1 << 20)
running = cache.lease(b"b" * 32, worker, 10)
print(done.slot, running.slot, running.lease_id, flush=True)
sys.stdin.read()
"""

# An agent that leases and commits without a pause: it is killed in the middle of writing a record.
BUSY_AGENT = """
import sys
from storage.arena.arena import Arena
from storage.arena.chunk_cache import ChunkCache
from storage.host.processes import ProcessId
me = ProcessId.current()
arena = Arena.create(sys.argv[1], slot_count=4, slot_bytes=4096)
arena.reserve()
cache = ChunkCache(4, journal=arena)
print("busy", flush=True)
number = 0
while True:
    number += 1
    lease = cache.lease(number.to_bytes(32, "little"), me, 1e9)
    arena.slot(lease.slot)[:] = number.to_bytes(8, "little") * 512
    cache.commit(lease.lease_id, number)
"""


@pytest.fixture
def path(shm_dir):
    yield arena_path("cluster", "node", str(shm_dir))
    sweep(str(shm_dir))
    assert os.listdir(shm_dir) == []


def process_of(child) -> ProcessId:
    found = ProcessId.of(child.pid)
    assert found is not None
    return found


def test_a_late_writer_changes_only_its_quarantined_slot(path):
    with Arena.create(path, slot_count=2, slot_bytes=SLOT) as arena:
        arena.reserve()
        cache = ChunkCache(2, journal=arena)
        # Which slot the writer will have is known before it starts; who it is, after.
        late = start_python(WRITER, path, "1", "L")
        try:
            assert ask(late) == "writing"
            lease = cache.lease(A, process_of(late), deadline_s=10)
            assert lease is not None
            assert lease.slot == 1
            late.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, late.pid, os.WSTOPPED)
            assert cache.expire(10) == [lease]
            assert lease.holder.is_alive()

            again = cache.lease(A, ProcessId.current(), deadline_s=20)
            assert again is not None
            assert again.slot == 0
            arena.slot(0)[:] = b"G" * SLOT
            assert cache.commit(again.lease_id, SLOT, ["rank 0"])
            assert cache.lease(B, ProcessId.current(), deadline_s=20) is None  # nothing left to give

            arena.slot(1)[:] = bytes(SLOT)
            late.send_signal(signal.SIGCONT)
            while bytes(arena.slot(1)[:1]) != b"L":
                time.sleep(0.001)  # it wakes up and writes, as it may
            assert arena.slot(0) == b"G" * SLOT
            assert cache.commit(lease.lease_id, SLOT) is Answer.LATE
            assert arena.records()[1].state is SlotState.QUARANTINED

            assert cache.overdue(20, 5) == [lease]
            assert lease.holder.kill()
            os.waitid(os.P_PID, late.pid, os.WEXITED | os.WNOWAIT)
            assert not lease.holder.is_alive()
            assert cache.process_dead(lease.holder) == []
            fresh = cache.lease(B, ProcessId.current(), deadline_s=30)
            assert fresh is not None
            assert fresh.slot == 1
            assert arena.slot(0) == b"G" * SLOT
        finally:
            late.kill()
            late.communicate()


def test_a_writer_killed_in_mid_write_leaves_nothing_visible(path):
    with Arena.create(path, slot_count=1, slot_bytes=SLOT) as arena:
        arena.reserve()
        cache = ChunkCache(1, journal=arena)
        writer = start_python(WRITER, path, "0", "W")
        try:
            assert ask(writer) == "writing"
            holder = process_of(writer)
            lease = cache.lease(A, holder, deadline_s=10)
            assert lease is not None
        finally:
            writer.kill()
            writer.communicate()
        assert not holder.is_alive()
        assert cache.process_dead(holder) == [lease]
        assert A not in cache
        assert cache.commit(lease.lease_id, SLOT) is not Answer.DONE
        assert cache.lease(A, ProcessId.current(), deadline_s=20)


def test_a_new_agent_keeps_committed_and_fences_leased_slots(path):
    me = ProcessId.current()
    agent = start_python(AGENT, path, str(me.pid), str(me.start_time))
    try:
        done_slot, leased_slot, lease_id = ask(agent).split()
        with Arena.open(path) as worker:
            agent.kill()
            agent.communicate()
            assert sweep(os.path.dirname(path)) == []  # a worker still has it
            with Arena.adopt(path) as arena:
                assert processes_mapping(path) == [me]
                cache = ChunkCache(3, journal=arena, ready_slots=arena.ready_slots)
                (quarantined,) = cache.restore(processes_mapping(path), 0)
                assert (quarantined.lease_id, quarantined.holder) == (lease_id, me)
                assert quarantined.slot == int(leased_slot)
                chunk = cache.lookup(A)
                assert chunk is not None
                assert chunk.slot == int(done_slot)
                assert worker.slot(chunk.slot)[: chunk.length_bytes] == b"a" * SLOT
                worker.slot(int(leased_slot))[:] = b"z" * SLOT  # late, and harmless
                third = cache.lease(B, me, 10)
                assert third is not None
                assert third.slot not in (chunk.slot, quarantined.slot)
                assert cache.abandon(lease_id)
                assert arena.slot(chunk.slot) == b"a" * SLOT
    finally:
        agent.kill()
        agent.communicate()
    assert [swept.path for swept in sweep(os.path.dirname(path))] == [path]


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.02, 0.05])
def test_an_agent_killed_anywhere_leaves_records_that_are_true(path, delay_s):
    agent = start_python(BUSY_AGENT, path)
    try:
        assert ask(agent) == "busy"
        time.sleep(delay_s)
    finally:
        agent.kill()
        agent.communicate()
    with Arena.adopt(path) as arena:
        cache = ChunkCache(4, journal=arena, ready_slots=arena.ready_slots)
        for lease in cache.restore(processes_mapping(path), 0):
            assert not lease.holder.is_alive()
            cache.process_dead(lease.holder)
        cache.settled(ProcessId.current())
        for slot, record in enumerate(arena.records()):
            if record.state is SlotState.COMMITTED:
                number = record.length_bytes
                assert record.key == number.to_bytes(32, "little")
                assert arena.slot(slot) == number.to_bytes(8, "little") * 512
        assert all(cache.lease(bytes([255, number]) * 16, ProcessId.current(), 1e9) for number in range(4))
