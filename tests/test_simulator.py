"""The simulator against its semantics written out naively, and its refusals."""

import numpy as np
import pytest
from remat.solvers import Candidate, Operator, Problem, Segment, Stage, Tensor, simulate
from remat.solvers.leaf_peaks import leaf_peaks
from remat.solvers.simulate import segment_peak
from remat.solvers.tables import tables_of

from .instances import random_chain, random_graph, random_plan, with_negative_extras
from .naive_simulator import naive_price


@pytest.mark.parametrize("make", [random_chain, random_graph])
def test_every_plan_costs_what_the_naive_simulator_says(make):
    rng = np.random.default_rng(1)
    depths = set()
    for _ in range(1500):
        problem = make(rng, int(rng.integers(1, 8)))
        if rng.random() < 0.4:
            problem = with_negative_extras(rng, problem)
        segments = random_plan(rng, problem)
        depths.add(max([0, *(1 + bool(s.children) + any(c.children for c in s.children) for s in segments)]))
        price = simulate(problem, segments)
        assert (price.peak_bytes, price.added_ns) == naive_price(problem, segments)
        assert simulate(problem, segments, trace=False).peak_bytes == price.peak_bytes
    assert depths == {0, 1, 2, 3}


def test_negative_extras_are_raised_once_and_every_plan_keeps_its_price():
    rng = np.random.default_rng(4)
    raised = 0
    for _ in range(500):
        make = random_chain if rng.random() < 0.5 else random_graph
        problem = with_negative_extras(rng, make(rng, int(rng.integers(1, 8))))
        tables = tables_of(problem)
        assert min(tables.forward_extra.min(), tables.backward_extra.min(), tables.entry_extra.min()) >= 0
        raised += tables.raised_bytes > 0
        segments = random_plan(rng, problem)
        price = simulate(problem, segments, trace=False)
        assert (price.peak_bytes, price.added_ns) == naive_price(problem, segments)
        assert all(segment_peak(tables, item).nbytes >= 0 for root in segments for item in root.walk())
    assert raised > 400


def test_the_moments_listed_hold_the_peak_and_its_place():
    rng = np.random.default_rng(2)
    for _ in range(200):
        problem = random_graph(rng, 6)
        price = simulate(problem, random_plan(rng, problem))
        largest = max(price.moments, key=lambda moment: moment.nbytes)
        assert price.peak_bytes == max(largest.nbytes, problem.floor_bytes)
        if price.phase != "floor":
            places = [(m.phase, m.stage) for m in price.moments if m.nbytes == price.peak_bytes]
            assert (price.phase, price.stage) in places


def _problem(**changes):
    stages = tuple(Stage(name=str(i), forward_ns=1) for i in range(3))
    tensors = (
        Tensor(nbytes=4, producer=0, holders=(0,), consumers=(1,), last_alive=1),
        Tensor(nbytes=4, producer=1, holders=(2,), consumers=(2,), last_alive=2),
    )
    candidates = (Candidate(start=0, stop=3, replay_ns=3, operators=(0,)), Candidate(start=1, stop=3, replay_ns=2))
    parts = {
        "stages": stages,
        "tensors": tensors,
        "candidates": candidates,
        "operators": (Operator(stage=0, forward_ns=1, outputs=(0,)),),
        "budget_bytes": 10,
    }
    return Problem(**(parts | changes))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((Segment(start=0, stop=2),), "none of the problem's 2 candidates"),
        ((Segment(start=0, stop=3), Segment(start=1, stop=3)), "siblings must ascend"),
        ((Segment(start=1, stop=3, keep=(0,)),), "not among those it may keep"),
        ((Segment(start=0, stop=3, children=(Segment(start=1, stop=3),)),), "lies inside 1:3"),
        (
            (Segment(start=0, stop=3, keep=(0,), children=(Segment(start=1, stop=3),)),),
            "save set of 1 operators and children",
        ),
    ],
)
def test_a_tree_that_is_no_plan_is_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        simulate(_problem(), segments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "at least one stage"),
        ({"tensors": (Tensor(nbytes=1, producer=0, holders=(1,), consumers=(), last_alive=1),)}, "save it without"),
        ({"tensors": (Tensor(nbytes=1, producer=0, holders=(), consumers=(2,), last_alive=1),)}, "before its last use"),
        ({"tensors": (Tensor(nbytes=1, producer=3, holders=(), consumers=(), last_alive=3),)}, "producer 3"),
        ({"operators": (Operator(stage=2, forward_ns=1, outputs=(0,)),)}, "is made by stage 0"),
        ({"candidates": (Candidate(start=0, stop=4, replay_ns=1),)}, "not an interval"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        simulate(_problem(**changes), ())


def test_a_segment_that_saves_nothing_is_never_replayed():
    stages = tuple(Stage(name=str(i), forward_ns=5) for i in range(2))
    problem = Problem(
        stages=stages, tensors=(), candidates=(Candidate(start=0, stop=2, replay_ns=10),), fixed_bytes=3, budget_bytes=9
    )
    price = simulate(problem, (Segment(start=0, stop=2),))
    assert (price.peak_bytes, price.added_ns) == (3, 0)
    assert {moment.phase for moment in price.moments} == {"forward", "backward"}


def test_the_peaks_of_all_bare_segments_in_one_sweep_are_those_of_each():
    rng = np.random.default_rng(3)
    for _ in range(200):
        tables = tables_of(random_graph(rng, int(rng.integers(1, 9))))
        for (start, stop), peak in leaf_peaks(tables).items():
            assert peak == segment_peak(tables, Segment(start=start, stop=stop)).nbytes
