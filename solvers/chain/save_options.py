"""A few save sets for each candidate, for the solvers that weigh whole options: the Rockmate idea.

Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
re-materialization in PyTorch", ICML 2023.

Which operators may be kept at all is the problem's to say (`Candidate.operators`; the planner's `bridge.save_rules`
decides it from what torch can do). Here only numbers decide, and `ilp` does without it.
"""

from __future__ import annotations

from ..problem import Candidate, Problem

MOST_OPTIONS = 8


def save_options(problem: Problem) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
    """Return the save sets offered for each candidate, by (start, stop); the empty one is not listed.

    Operators are taken in order of nanoseconds saved per byte kept, and at most `MOST_OPTIONS` of the sets so made
    are offered, spread evenly over the time saved. An output that is read after the segment is held by its reader
    anyway and counts as free. Candidates that look alike (the same operators at the same offsets) are solved once.
    """
    known: dict[object, tuple[tuple[int, ...], ...]] = {}
    found: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    last_read = [tensor.consumers[-1] if tensor.consumers else tensor.producer for tensor in problem.tensors]
    outlives = [tensor.last_alive >= len(problem.stages) for tensor in problem.tensors]
    for candidate in problem.candidates:
        if not candidate.operators:
            continue
        costs: list[tuple[int, int]] = []
        for index in candidate.operators:
            operator = problem.operators[index]
            kept = [t for t in set(operator.outputs) if last_read[t] < candidate.stop and not outlives[t]]
            costs.append((operator.forward_ns, sum(problem.tensors[t].nbytes for t in kept)))
        signature = (candidate.selective_ns, tuple(costs))
        if signature not in known:
            known[signature] = _prefixes(costs, candidate)
        options = known[signature]
        if options:
            chosen = tuple(tuple(candidate.operators[offset] for offset in option) for option in options)
            found[candidate.start, candidate.stop] = chosen
    return found


def _prefixes(costs: list[tuple[int, int]], candidate: Candidate) -> tuple[tuple[int, ...], ...]:
    """Return sets of offsets into the candidate's operators."""
    useful = [offset for offset, (saved_ns, _) in enumerate(costs) if saved_ns > 0]
    useful.sort(key=lambda offset: (-costs[offset][0] / max(costs[offset][1], 1e-9), offset))
    prefixes: list[tuple[int, tuple[int, ...]]] = []
    saved = 0
    for length, offset in enumerate(useful, start=1):
        saved += costs[offset][0]
        if saved > candidate.selective_ns:
            prefixes.append((saved, tuple(sorted(useful[:length]))))
    if len(prefixes) <= MOST_OPTIONS:
        return tuple(option for _, option in prefixes)
    chosen: list[tuple[int, ...]] = []
    for step in range(1, MOST_OPTIONS + 1):
        target = prefixes[-1][0] * step / MOST_OPTIONS
        option = next(option for total, option in prefixes if total >= target)
        if option not in chosen:
            chosen.append(option)
    return tuple(chosen)
