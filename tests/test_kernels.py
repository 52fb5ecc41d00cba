"""Kernels go to the operators that launched them, whatever the driver's numbers are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from remat.profiler.kernels import device_ns, marked_durations, with_host

from .emulated_cuda import Event, launched

MARK = "remat.operator"
KERNELS = [5, 70, 0, 900, 13]


@pytest.mark.parametrize("first", range(1, 40))
def test_kernels_go_to_the_operators_that_launched_them(first):
    events = launched(MARK, KERNELS, first_driver_number=first)
    assert marked_durations(events, MARK, on_device=True) == KERNELS
    assert marked_durations(events[::-1], MARK, on_device=True) == KERNELS


def test_a_kernel_that_no_operator_launched_is_known_by_its_launch():
    events = launched(MARK, KERNELS, first_driver_number=500)
    events += [
        Event("cuLaunchKernel", 1300, 40, 800, activity="cuda_driver"),
        Event("triton", 11_500, 33, 800, activity="kernel"),
        Event("cudaLaunchKernel", 90_000, 40, 801, activity="cuda_runtime"),
        Event("outside", 91_000, 77, 801, activity="kernel"),
    ]
    assert marked_durations(events, MARK, on_device=True) == [5, 103, 0, 900, 13]


def test_asynchronous_events_own_no_kernels():
    events = launched(MARK, KERNELS, first_driver_number=500)
    events.append(Event("aten::mm", 4100, 10, 2, asynchronous=True))
    assert marked_durations(events, MARK, on_device=True) == KERNELS


def test_the_devices_time_is_counted_once():
    assert device_ns(launched(MARK, KERNELS, first_driver_number=3)) == sum(KERNELS)


def test_on_the_host_an_operator_takes_its_own_time():
    assert marked_durations(launched(MARK, KERNELS, first_driver_number=3), MARK, on_device=False) == [700] * 5


def test_operators_of_a_launch_bound_stack_cost_the_same():
    assert with_host([1, 3, 2, 2], 4000) == [1000] * 4


def test_the_host_shows_only_where_kernels_are_short():
    assert with_host([900, 10, 10, 900], 1900) == [900, 50, 50, 900]


def test_where_kernels_take_all_the_time_the_host_costs_nothing():
    assert with_host([900, 10], 800) == [900, 10]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.integers(0, 400_000))
def test_with_the_host_operators_together_cost_what_the_run_took(kernels, whole):
    found = with_host(kernels, whole)
    assert all(ours >= kernel for ours, kernel in zip(found, kernels, strict=True))
    assert 0 <= max(whole, sum(kernels)) - sum(found) < len(kernels)
