"""The model of the caching allocator against segments worked out by hand from torch's rules, and torch's constants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remat.profiler import caching_allocator
from remat.profiler.caching_allocator import AllocatorSettings, CachingAllocator, DeviceFullError
from remat.profiler.reserved import Reserved, reserved_bytes
from remat.profiler.step_record import Operator, StepRecord, Storage

MIB = 1 << 20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def test_the_constants_are_those_of_the_installed_torch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    given = {name: int(value) for name, value in re.findall(r"constexpr size_t k(\w+) = (\d+);", header.read_text())}
    assert given == {
        "SmallBuffer": caching_allocator.SMALL_BUFFER,
        "MinBlockSize": caching_allocator.MIN_BLOCK,
        "SmallSize": caching_allocator.SMALL_SIZE,
        "MinLargeAlloc": caching_allocator.MIN_LARGE_ALLOC,
        "RoundLarge": caching_allocator.ROUND_LARGE,
    }


def test_small_requests_share_a_segment_of_2_mib():
    memory = CachingAllocator()
    memory.allocate(1)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (512, 2 * MIB)
    memory.allocate(MIB)
    assert memory.reserved_bytes == 2 * MIB
    # 2 MiB less 512 bytes less 1 MiB are left: not enough for another MiB.
    memory.allocate(MIB)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (512 + 2 * MIB, 4 * MIB)


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [(MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (21 * MIB, 22), (10 * MIB + 1, 12)],
)
def test_the_size_of_a_segment_depends_on_the_request(request_bytes, segment):
    memory = CachingAllocator()
    memory.allocate(request_bytes)
    assert memory.reserved_bytes == segment * MIB


def test_a_large_block_is_split_only_where_more_than_a_mib_is_left():
    memory = CachingAllocator()
    first = memory.allocate(30 * MIB)
    memory.free(first)
    # 29 MiB leave 1 MiB: kept whole, and counted as allocated.
    second = memory.allocate(29 * MIB)
    assert memory.allocated_bytes == 30 * MIB
    memory.free(second)
    memory.allocate(28 * MIB)
    assert memory.allocated_bytes == 28 * MIB
    # The 2 MiB left serve the next request of the large pool.
    memory.allocate(2 * MIB)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (30 * MIB, 30 * MIB)


def test_neighbours_are_merged_when_both_are_free():
    memory = CachingAllocator()
    parts = [memory.allocate(5 * MIB) for _ in range(4)]
    assert memory.reserved_bytes == 20 * MIB
    memory.free(parts[0])
    memory.free(parts[2])
    # 10 MiB are free in two pieces.
    apart = memory.allocate(10 * MIB)
    assert memory.reserved_bytes == 30 * MIB
    memory.free(apart)
    memory.free(parts[1])
    memory.allocate(15 * MIB)
    assert memory.reserved_bytes == 30 * MIB


def test_the_smallest_block_that_fits_is_taken():
    memory = CachingAllocator()
    large, small = memory.allocate(40 * MIB), memory.allocate(12 * MIB)
    memory.free(large)
    memory.free(small)
    memory.allocate(12 * MIB)
    memory.allocate(40 * MIB)
    assert memory.reserved_bytes == 52 * MIB


def test_the_pools_of_small_and_large_requests_do_not_help_each_other():
    memory = CachingAllocator()
    memory.free(memory.allocate(20 * MIB))
    memory.allocate(MIB)
    assert memory.reserved_bytes == 22 * MIB


def test_every_stream_has_pools_of_its_own():
    memory = CachingAllocator()
    memory.free(memory.allocate(64 * MIB, stream=0))
    memory.allocate(64 * MIB, stream=1)
    assert memory.reserved_bytes == 128 * MIB


def test_what_another_stream_uses_is_taken_until_the_streams_have_met():
    memory = CachingAllocator()
    handle = memory.allocate(64 * MIB)
    memory.record_stream(handle, 1)
    memory.free(handle)
    other = memory.allocate(64 * MIB)
    assert memory.reserved_bytes == 128 * MIB
    memory.synchronize()
    memory.allocate(64 * MIB)
    memory.free(other)
    assert memory.reserved_bytes == 128 * MIB


def test_expandable_segments_grow_by_pages_where_others_are_added():
    sizes = [30 * MIB, 50 * MIB, 70 * MIB]
    plain, expandable = CachingAllocator(), CachingAllocator(EXPANDABLE)
    for memory in (plain, expandable):
        for size in sizes:
            memory.free(memory.allocate(size))
    # One segment for each size; or one of 4 pages of 20 MiB.
    assert (plain.reserved_bytes, expandable.reserved_bytes) == (150 * MIB, 80 * MIB)


def test_expandable_segments_split_every_remainder():
    memory = CachingAllocator(EXPANDABLE)
    memory.allocate(19 * MIB)
    memory.allocate(MIB + 512)
    # A MiB is left of the first page; the request takes it and 512 bytes of a second.
    assert (memory.allocated_bytes, memory.reserved_bytes) == (20 * MIB + 512, 40 * MIB)
    memory.allocate(MIB // 2)
    assert memory.reserved_bytes == 42 * MIB


def test_free_pages_in_the_middle_of_an_expandable_segment_are_given_back():
    memory = CachingAllocator(EXPANDABLE)
    handles = [memory.allocate(40 * MIB) for _ in range(3)]
    memory.free(handles[1])
    memory.empty_cache()
    assert memory.reserved_bytes == 80 * MIB
    # Mapped again where it was.
    memory.allocate(30 * MIB)
    assert memory.reserved_bytes == 120 * MIB
    memory.allocate(10 * MIB)
    assert memory.reserved_bytes == 120 * MIB


def test_old_segments_are_collected_above_the_threshold():
    memory = CachingAllocator(AllocatorSettings(collection_threshold=0.5), capacity_bytes=200 * MIB)
    old, young = memory.allocate(40 * MIB), memory.allocate(42 * MIB)
    memory.free(old)
    memory.allocate(44 * MIB)
    memory.free(young)
    assert memory.reserved_bytes == 126 * MIB
    # 126 MiB are more than half of the card. The old one is free for two requests, the young for one, 1.5 on average.
    memory.allocate(60 * MIB)
    assert memory.reserved_bytes == 146 * MIB


def test_without_a_threshold_segments_stay_until_the_card_is_full():
    memory = CachingAllocator(capacity_bytes=200 * MIB)
    handles = [memory.allocate(size * MIB) for size in (60, 70)]
    for handle in handles:
        memory.free(handle)
    memory.allocate(80 * MIB)
    # 130 and 80 do not fit into 200: everything free is given back first.
    assert (memory.reserved_bytes, memory.peak_reserved_bytes) == (80 * MIB, 130 * MIB)
    with pytest.raises(DeviceFullError, match="do not fit"):
        memory.allocate(121 * MIB)


def test_blocks_above_the_limit_are_not_split():
    memory = CachingAllocator(AllocatorSettings(max_split_bytes=100 * MIB))
    memory.free(memory.allocate(200 * MIB))
    memory.allocate(50 * MIB)
    assert memory.reserved_bytes == 250 * MIB
    memory.allocate(181 * MIB)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (250 * MIB, 250 * MIB)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30 * MIB), st.integers(0, 1), st.integers(0, 12)), max_size=60),
    st.booleans(),
)
def test_whatever_is_allocated_is_reserved_and_comes_back(steps, expandable):
    memory = CachingAllocator(AllocatorSettings(expandable_segments=expandable))
    live = []
    for nbytes, stream, victim in steps:
        live.append(memory.allocate(nbytes, stream=stream))
        if victim < len(live):
            memory.free(live.pop(victim))
        assert memory.allocated_bytes <= memory.reserved_bytes
        assert memory.reserved_bytes == sum(size for size in sizes_of(memory))
    for handle in live:
        memory.free(handle)
    memory.empty_cache()
    assert (memory.allocated_bytes, memory.reserved_bytes) == (0, 0)


def sizes_of(memory):
    """Sum the blocks in use and the free ones."""
    yield from (block.nbytes for block in memory._used.values())
    yield from (entry[0] for entries in memory._free.values() for entry in entries)


def record(*storages, operators=3, scratch=0):
    empty = {"reads": (), "produces": (), "writes": (), "output_bytes": 0, "call": -1}
    flags = dict.fromkeys(("is_random", "is_view", "private_generator", "fills_argument", "counted"), False)
    return StepRecord(
        operators=tuple(
            Operator(operator="aten.mm.default", scratch_bytes=scratch if k == 1 else 0, **empty, **flags)
            for k in range(operators)
        ),
        calls=(),
        storages=tuple(
            Storage(nbytes=nbytes, kind=kind, name="", born=born, last=last) for nbytes, kind, born, last in storages
        ),
        forward_stop=operators,
        loss_stop=operators,
    )


def test_outputs_are_allocated_before_inputs_are_freed():
    step = record((30 * MIB, "activation", 0, 1), (30 * MIB, "activation", 1, 2))
    assert reserved_bytes(step) == Reserved(allocated_bytes=60 * MIB, reserved_bytes=60 * MIB)


def test_memory_of_one_size_does_not_serve_a_larger_one():
    step = record((30 * MIB, "activation", 0, 0), (40 * MIB, "activation", 1, 1), (50 * MIB, "activation", 2, 2))
    assert reserved_bytes(step) == Reserved(allocated_bytes=50 * MIB, reserved_bytes=120 * MIB)
    expandable = reserved_bytes(step, settings=AllocatorSettings(expandable_segments=True))
    assert expandable == Reserved(allocated_bytes=50 * MIB, reserved_bytes=60 * MIB)


def test_workspace_and_the_optimizers_state_are_reserved_as_well():
    step = record((32 * MIB, "parameter", -1, None), (32 * MIB, "gradient", 1, None), scratch=20 * MIB)
    assert reserved_bytes(step).reserved_bytes == 84 * MIB
    # Two copies of state beside both; the workspace's segment is too small for them. Temporaries have one of their own.
    both = reserved_bytes(step, state_bytes=64 * MIB, optimizer_bytes=32 * MIB)
    assert both == Reserved(allocated_bytes=160 * MIB, reserved_bytes=180 * MIB)
