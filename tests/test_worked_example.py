"""The worked example of the notes, a toy model of 16 equal layers, priced by the simulator.

Its figures are activations of a toy; measured models differ, and no report mixes the two.
"""

import pytest
from remat.solvers import SOLVERS, Candidate, Problem, Segment, Stage, Tensor, simulate

MIB = 2**20
LAYERS = 16
BOUNDARY = 8 * MIB
FORWARD, BACKWARD = 1, 2


def toy_model(budget_bytes: int = 136 * MIB) -> Problem:
    """16 layers that save their inputs and outputs, and a loss that saves its input: 17 boundary tensors of 8 MiB."""
    layers = [Stage(name=f"layer {index}", forward_ns=FORWARD) for index in range(LAYERS)]
    tensors = tuple(
        Tensor(
            nbytes=BOUNDARY,
            producer=index,
            holders=tuple(stage for stage in (index, index + 1) if stage >= 0),
            consumers=(index + 1,),
            last_alive=index + 1,
        )
        for index in range(-1, LAYERS)
    )
    candidates = tuple(
        Candidate(start=start, stop=stop, replay_ns=(stop - start) * FORWARD, block=stop == start + 1)
        for start in range(LAYERS)
        for stop in range(start + 1, LAYERS + 1)
    )
    return Problem(
        stages=(*layers, Stage(name="loss", forward_ns=0)),
        tensors=tensors,
        candidates=candidates,
        budget_bytes=budget_bytes,
        step_ns=LAYERS * (FORWARD + BACKWARD),
    )


def groups(size: int) -> tuple[Segment, ...]:
    return tuple(Segment(start=start, stop=start + size) for start in range(0, LAYERS, size))


def retained_bytes(segments: tuple[Segment, ...]) -> int:
    """Return what is alive when the forward ends."""
    return [moment.nbytes for moment in simulate(toy_model(), segments).moments if moment.phase == "forward"][-1]


def test_nothing_checkpointed_holds_all_seventeen_boundaries():
    assert simulate(toy_model(), ()).peak_bytes == retained_bytes(()) == 136 * MIB


def test_four_segments_of_four_retain_five_boundaries():
    assert retained_bytes(groups(4)) == 5 * BOUNDARY == 40 * MIB


def test_a_replay_makes_four_more_tensors_and_the_peak_is_47_percent_less():
    """The toy adds the two up; counted moment by moment, the output is gone when the last replay makes it again."""
    price = simulate(toy_model(), groups(4))
    replay = [moment.nbytes for moment in price.moments if moment.phase == "replay" and moment.stage >= 12]
    inputs = 4 * BOUNDARY
    made_by_replay = max(replay) - inputs
    toy_peak = retained_bytes(groups(4)) + made_by_replay
    assert toy_peak == 72 * MIB
    assert 1 - toy_peak / retained_bytes(()) == pytest.approx(0.471, abs=5e-4)
    assert price.peak_bytes == toy_peak - BOUNDARY


def test_one_full_replay_takes_a_third_more_time():
    problem = toy_model()
    added = simulate(problem, groups(4)).added_ns
    assert problem.step_ns == 48
    assert problem.step_ns + added == 64
    assert added / problem.step_ns == pytest.approx(0.333, abs=5e-4)


def test_the_root_of_the_number_of_layers_is_the_best_size_of_a_segment():
    peaks = {size: simulate(toy_model(), groups(size)).peak_bytes for size in (1, 2, 4, 8, 16)}
    assert min(peaks, key=lambda size: peaks[size]) == 4
    # Idealised storage, N/k boundaries and k tensors of a replay, has the same least place.
    retained = {size: len(groups(size)) + size for size in peaks}
    assert min(retained, key=lambda size: retained[size]) == 4
    assert {size: peaks[size] // BOUNDARY for size in peaks} == retained


def test_the_solvers_do_better_than_four_full_groups_at_the_same_peak():
    peak = simulate(toy_model(), groups(4)).peak_bytes
    assert SOLVERS["dp"](toy_model(peak)).added_ns < 16
    assert SOLVERS["dp"](toy_model(peak)).added_ns <= SOLVERS["sqrt"](toy_model(peak)).added_ns
