"""The benchmark's unrestricted programme against exhaustive search over states, and against the exact solvers."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
import torch
from remat.profiler import profile
from remat.solvers import SOLVERS, BudgetTooSmallError, Operator, Problem, Stage, Tensor, simulate

from benchmarks.checkmate import Programme, periods, price, runs_of
from benchmarks.small_graphs import ResidualBlock, at_module_calls, mean_square, node_problem

from .instances import random_chain, random_graph, random_plan

EXACT = ("dp", "ilp", "dp_nested")


def unit_chain(count: int) -> Problem:
    """Make nodes of one byte and one nanosecond each; the backward of each needs what it read."""
    tensors = [Tensor(nbytes=1, producer=i - 1, holders=(i,), consumers=(i,), last_alive=i) for i in range(count)] + [
        Tensor(nbytes=1, producer=count - 1, holders=(), consumers=(), last_alive=count - 1)
    ]
    stages = tuple(Stage(name=str(i), forward_ns=1) for i in range(count))
    return Problem(stages=stages, tensors=tuple(tensors), candidates=(), budget_bytes=0)


def with_every_stage_savable(problem: Problem) -> Problem:
    """Let save sets name whole stages, at just what the stage takes."""
    operators = tuple(
        Operator(
            stage=i,
            forward_ns=stage.forward_ns,
            outputs=tuple(t for t, tensor in enumerate(problem.tensors) if tensor.producer == i),
        )
        for i, stage in enumerate(problem.stages)
    )
    holders = {holder for tensor in problem.tensors for holder in tensor.holders}
    candidates = tuple(
        replace(c, operators=tuple(range(c.start, 1 + max(h for h in holders if c.start <= h < c.stop))))
        for c in problem.candidates
    )
    return replace(problem, operators=operators, candidates=candidates)


def exhaustive(problem: Problem) -> int | None:
    """Return the least time added by any order of running, dropping and going on, by Dijkstra over states."""
    count, tensors = len(problem.stages), list(enumerate(problem.tensors))
    ends = periods(count)
    outliving = frozenset(t for t, tensor in tensors if tensor.last_alive >= count)
    reads = [frozenset(t for t, tensor in tensors if i in tensor.consumers) for i in range(count)]
    makes = [frozenset(t for t, tensor in tensors if i == tensor.producer) for i in range(count)]
    holds = [frozenset(t for t, tensor in tensors if i in tensor.holders) for i in range(count)]

    def fits(there: frozenset[int], extra: int) -> bool:
        alive = sum(problem.tensors[t].nbytes for t in there)
        return problem.fixed_bytes + alive + extra <= problem.budget_bytes

    start = (0, frozenset(t for t, tensor in tensors if tensor.producer < 0))
    queue, best, order = [(0, 0, start)], {start: 0}, 0
    while queue and problem.floor_bytes <= problem.budget_bytes:
        cost, _, (period, there) = heapq.heappop(queue)
        if period == len(ends):
            return cost
        if cost > best[period, there]:
            continue
        phase, node = ends[period]
        stage = problem.stages[node]
        entry = stage.entry_extra_bytes if phase == "backward" else 0
        moves = [(0, (period, there - {t})) for t in there - outliving]
        for k in range(node + (phase == "backward")):
            extra = problem.stages[k].forward_extra_bytes + entry
            if reads[k] <= there and fits(there | makes[k], extra):
                moves.append((problem.stages[k].forward_ns, (period, there | makes[k])))
        if phase == "forward":
            if reads[node] <= there and fits(there | makes[node], stage.forward_extra_bytes):
                moves.append((0, (period + 1, there | makes[node])))
        elif holds[node] <= there and fits(there, stage.backward_extra_bytes):
            moves.append((0, (period + 1, there)))
        for added, state in moves:
            if cost + added < best.get(state, 1 << 60):
                best[state] = cost + added
                order += 1
                heapq.heappush(queue, (cost + added, order, state))
    return None


def optimum(problem: Problem) -> int | None:
    try:
        found = Programme(problem).solve()
    except LookupError:
        return None
    assert found.proven
    assert found.added_ns == pytest.approx(found.bound, abs=1e-3)
    assert found.peak_bytes <= problem.budget_bytes
    return found.added_ns


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_on_chains_of_unit_nodes_it_equals_exhaustive_search_at_every_budget(count: int):
    found = [optimum(replace(unit_chain(count), budget_bytes=budget)) for budget in range(1, count + 2)]
    assert found == [exhaustive(replace(unit_chain(count), budget_bytes=budget)) for budget in range(1, count + 2)]
    assert found[0] is None
    assert found[-1] == 0


def test_a_chain_with_room_for_its_input_and_two_more_costs_quadratic_time():
    """Each replay runs from the input and leaves two neighbours for two backwards: (n - 2) + (n - 4) + ... + 2."""
    assert optimum(replace(unit_chain(8), budget_bytes=3)) == 6 + 4 + 2


def test_on_random_chains_and_graphs_it_equals_exhaustive_search():
    rng = np.random.default_rng(40)
    solved = added = 0
    for number in range(90):
        make = random_chain if number % 2 else random_graph
        problem = make(rng, int(rng.integers(2, 5)))
        if len(problem.tensors) > 9:
            continue
        peak = max(simulate(problem, (), trace=False).peak_bytes, problem.floor_bytes)
        problem = replace(problem, budget_bytes=int(rng.integers(3 * peak // 4, peak + 1)))
        found, expected = optimum(problem), exhaustive(problem)
        assert found == expected
        solved += found is not None
        added += bool(found)
    assert solved > 20
    assert added > 10


def test_a_plan_is_a_schedule_of_at_most_its_peak_and_time():
    rng = np.random.default_rng(41)
    for _ in range(200):
        problem = with_every_stage_savable(random_graph(rng, int(rng.integers(2, 7)), operators=False, every=True))
        plan = random_plan(rng, problem)
        planned = simulate(problem, plan, trace=False)
        peak, added = price(problem, runs_of(problem, plan))
        assert peak <= planned.peak_bytes
        assert added <= planned.added_ns


def test_no_exact_solver_beats_it_at_the_same_budget():
    rng = np.random.default_rng(42)
    better = 0
    for number in range(20):
        make = random_chain if number % 2 else random_graph
        problem = with_every_stage_savable(make(rng, 5, every=True))
        with pytest.raises(BudgetTooSmallError) as caught:
            SOLVERS["dp"](replace(problem, budget_bytes=-1))
        problem = replace(problem, budget_bytes=caught.value.least_peak_bytes + int(rng.integers(0, 9)))
        found = optimum(problem)
        assert found is not None
        added = [SOLVERS[solver](problem).added_ns for solver in EXACT]
        assert found <= min(added)
        better += found < min(added)
    assert better > 3


def test_with_room_for_the_unplanned_step_it_recomputes_nothing():
    problem = random_chain(np.random.default_rng(43), 6)
    peak = simulate(problem, (), trace=False).peak_bytes
    assert Programme(replace(problem, budget_bytes=peak)).solve().added_ns == 0


def test_its_least_peak_is_where_budgets_begin_to_be_met():
    problem = unit_chain(6)
    least = Programme(replace(problem, budget_bytes=7), least_peak=True).solve()
    assert least.peak_bytes == 3
    assert least.bound == pytest.approx(3)
    assert optimum(replace(problem, budget_bytes=2)) is None


def test_a_schedule_that_reads_what_is_not_there_has_no_price():
    problem = unit_chain(3)
    with pytest.raises(ValueError, match="before they are made"):
        price(problem, (frozenset({2}), *[frozenset[int]()] * 5))


def test_negative_extras_are_refused():
    problem = unit_chain(2)
    stages = (replace(problem.stages[0], backward_extra_bytes=-1), problem.stages[1])
    with pytest.raises(ValueError, match="must not be negative"):
        Programme(replace(problem, stages=stages))


def test_a_recorded_step_as_nodes_has_the_recorded_peak_and_no_plan_beats_the_optimum():
    torch.manual_seed(0)
    recorded = profile(ResidualBlock(8, 4, 16), torch.randn(2, 8, 8, 8), loss=mean_square, repeats=0)
    problem = node_problem(recorded, 10)
    assert len(problem.stages) == 10
    peak = simulate(problem, (), trace=False).peak_bytes
    assert peak == recorded.peak_bytes()
    offered = at_module_calls(problem, recorded, 10)
    assert 0 < len(offered.candidates) < len(problem.candidates)
    with pytest.raises(BudgetTooSmallError) as caught:
        SOLVERS["dp"](offered)
    budget = (2 * caught.value.least_peak_bytes + peak) // 3
    found = optimum(replace(problem, budget_bytes=budget))
    added = [SOLVERS[solver](replace(problem, budget_bytes=budget)).added_ns for solver in EXACT]
    assert found is not None
    assert 0 < found <= min(added)
    assert min(added) <= SOLVERS["ilp"](replace(offered, budget_bytes=budget)).added_ns
