"""Random problems with blocks that are built alike, and an exhaustive search of the plans that treat them so."""

from itertools import product

import numpy as np
from remat.solvers import Candidate, Kind, Operator, Problem, Segment, Stage, Tensor, simulate


def problem_of_kinds(rng: np.random.Generator, layout: str, *, stages: int = 3, noise: bool = False) -> Problem:
    """Make a chain of the blocks that `layout` spells: "aabab" has three of one kind and two of another, "-" is none.

    Each stage reads its predecessor's output, which is held at random; a block may read what an earlier stage made.
    """
    made = {letter: _Shape(rng, stages) for letter in sorted(set(layout) - {"-"})}
    builder = _Builder(rng, noise)
    for letter in layout:
        if letter == "-":
            builder.free()
        else:
            builder.block(letter, made[letter])
    return builder.problem()


def best_alike(problem: Problem, budget: int) -> int | None:
    """Return the least time of all plans with blocks alike that fit a budget, by trying all."""
    fitting = [added for peak, added in all_alike(problem) if peak <= budget]
    return min(fitting, default=None)


def all_alike(problem: Problem) -> list[tuple[int, int]]:
    """Return peak and time of all plans with blocks alike, every save set among them."""
    spans = [(bounds[0], bounds[-1]) for kind in problem.kinds for bounds in kind.bounds]
    outside = [c for c in problem.candidates if all(c.stop <= a or b <= c.start for a, b in spans)]
    free = _plans(problem, 0, len(problem.stages), outside)
    by_kind = [_ways(problem, kind) for kind in problem.kinds]
    found = set()
    for chosen in product(free, *by_kind):
        segments = tuple(sorted((s for part in chosen for s in part), key=lambda s: s.start))
        price = simulate(problem, segments, trace=False)
        found.add((price.peak_bytes, price.added_ns))
    return sorted(found)


def _ways(problem, kind):
    """All ways to give a kind one pattern, or two."""
    first = kind.bounds[0]
    inside = [c for c in problem.candidates if first[0] <= c.start and c.stop <= first[-1]]
    patterns = _plans(problem, first[0], first[-1], inside)
    count = len(kind.bounds)
    moved = {p: [tuple(_moved(s, kind, block) for s in p) for block in range(count)] for p in patterns}
    ways = set()
    for one, other in product(patterns, patterns):
        for change in range(1, count + 1):
            blocks = [moved[one][b] if b < change else moved[other][b] for b in range(count)]
            ways.add(tuple(s for block in blocks for s in block))
    return list(ways)


def _moved(segment, kind, block):
    offset = kind.bounds[block][0] - kind.bounds[0][0]
    index = {operator: place for place, operator in enumerate(kind.operators[0])}
    keep = tuple(kind.operators[block][index[operator]] for operator in segment.keep)
    return Segment(start=segment.start + offset, stop=segment.stop + offset, keep=keep)


def _plans(problem, position, stop, candidates):
    if position >= stop:
        return [()]
    found = list(_plans(problem, position + 1, stop, candidates))
    for c in candidates:
        if c.start == position:
            for rest in _plans(problem, c.stop, stop, candidates):
                for mask in range(1 << len(c.operators)):
                    keep = tuple(o for n, o in enumerate(c.operators) if mask >> n & 1)
                    found.append((Segment(start=c.start, stop=c.stop, keep=keep), *rest))
    return found


class _Shape:
    def __init__(self, rng, stages):
        self.stages = stages
        self.forward_ns = rng.integers(1, 12, stages)
        self.boundary = [(int(rng.integers(1, 20)), rng.random(2) < 0.6) for _ in range(stages)]
        self.own = [int(rng.integers(1, 20)) if rng.random() < 0.8 else 0 for _ in range(stages)]
        self.candidates = [
            (a, b, int(rng.integers(0, 3)), int(rng.integers(0, 3)))
            for a in range(stages)
            for b in range(a + 1, stages + 1)
            if rng.random() < 0.7
        ]
        self.kept = int(rng.integers(0, stages)) if rng.random() < 0.8 else None
        self.shared = bool(rng.random() < 0.4)


class _Builder:
    def __init__(self, rng, noise):
        self.rng, self.noise = rng, noise
        self.stages, self.tensors, self.candidates, self.operators = [], [], [], []
        self.kinds = {}
        self.readers = []

    def free(self):
        shape = _Shape(self.rng, 1)
        shape.kept = None
        self._add(shape)

    def block(self, letter, shape):
        start = len(self.stages)
        operators = self._add(shape)
        bounds = tuple(range(start, len(self.stages) + 1))
        known = self.kinds.setdefault(letter, ([], []))
        known[0].append(bounds)
        known[1].append(operators)

    def _add(self, shape):
        start, rng = len(self.stages), self.rng
        extras = rng.integers(0, 6, (shape.stages, 3)) if self.noise or shape.stages == 1 else np.zeros((9, 3), int)
        if shape.shared:
            self.readers.append(start)
        operators = []
        for n in range(shape.stages):
            ns = int(shape.forward_ns[n]) + (int(rng.integers(0, 3)) if self.noise else 0)
            fields = ("forward_extra_bytes", "backward_extra_bytes", "entry_extra_bytes")
            extra = {name: int(value) for name, value in zip(fields, extras[n], strict=True)}
            self.stages.append(Stage(name=f"s{start + n}", forward_ns=ns, **extra))
            if shape.own[n]:
                if shape.kept == n:
                    operators.append(len(self.operators))
                    output = (len(self.tensors),)
                    self.operators.append(Operator(stage=start + n, forward_ns=ns // 2, outputs=output))
                self._tensor(shape.own[n], start + n, (start + n,), (), start + n)
        self._boundaries = [*getattr(self, "_boundaries", []), *shape.boundary]
        for a, b, more, selective in shape.candidates:
            replay = sum(self.stages[start + n].forward_ns for n in range(a, b)) + more
            inside = tuple(o for o in operators if start + a <= self.operators[o].stage < start + b)
            self.candidates.append((start + a, start + b, replay, selective, inside))
        return tuple(operators)

    def _tensor(self, nbytes, producer, holders, consumers, last):
        self.tensors.append(
            Tensor(nbytes=nbytes, producer=producer, holders=holders, consumers=consumers, last_alive=last)
        )

    def problem(self):
        count = len(self.stages)
        for stage, (nbytes, held) in enumerate(self._boundaries):
            consumers = (stage + 1,) if stage + 1 < count else ()
            holders = tuple(s for s, is_held in zip((stage, stage + 1), held, strict=True) if is_held and s < count)
            self._tensor(nbytes, stage, holders, consumers, min(stage + 1, count))
        if self.readers:
            self._tensor(7, -1, tuple(self.readers), tuple(self.readers), self.readers[-1])
        saved = {s for tensor in self.tensors for s in tensor.holders}
        candidates = tuple(
            Candidate(start=a, stop=b, replay_ns=replay, selective_ns=selective, operators=inside, block=False)
            for a, b, replay, selective, inside in sorted(self.candidates)
            if any(s in saved for s in range(a, b))
        )
        last = [max(s for s in saved if c.start <= s < c.stop) for c in candidates]
        candidates = tuple(
            Candidate(
                start=c.start,
                stop=c.stop,
                replay_ns=c.replay_ns,
                selective_ns=c.selective_ns,
                operators=tuple(o for o in c.operators if self.operators[o].stage <= end),
            )
            for c, end in zip(candidates, last, strict=True)
        )
        return Problem(
            stages=tuple(self.stages),
            tensors=tuple(self.tensors),
            candidates=candidates,
            operators=tuple(self.operators),
            kinds=tuple(Kind(bounds=tuple(b), operators=tuple(o)) for b, o in self.kinds.values()),
            budget_bytes=0,
        )
