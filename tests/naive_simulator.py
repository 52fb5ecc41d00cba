"""The simulator's semantics written out moment by moment with sets: slow, and independent of remat.solvers.simulate."""

from remat.solvers.problem import Problem, Segment


def naive_price(problem: Problem, segments: tuple[Segment, ...]) -> tuple[int, int]:
    """Return (peak_bytes, added_ns)."""
    stages, tensors = problem.stages, problem.tensors
    count = len(stages)
    everything = range(len(tensors))
    outliving = {t for t in everything if tensors[t].last_alive >= count}
    totals = [problem.floor_bytes]

    def size(names):
        return problem.fixed_bytes + sum(tensors[t].nbytes for t in set(names))

    def kept_outputs(segment):
        return {t for o in segment.keep for t in problem.operators[o].outputs}

    def inputs(segment):
        inside = set(range(segment.start, segment.stop))
        return {t for t in everything if tensors[t].producer < segment.start and inside & set(tensors[t].consumers)}

    def items_of(start, stop, children):
        covered = {i for child in children for i in range(child.start, child.stop)}
        items = [(i, None) for i in range(start, stop) if i not in covered] + [(c.start, c) for c in children]
        return sorted(items, key=lambda item: item[0])

    def holds(position, segment):
        if segment is None:
            return {t for t in everything if position in tensors[t].holders}
        return inputs(segment) | kept_outputs(segment)

    def held_where(items, tracked, accept):
        return {t for p, s in items if accept(p) for t in holds(p, s) if t in tracked}

    def walk_backward(items, tracked, base):
        for position, segment in reversed(items):
            if segment is None:
                alive = base | held_where(items, tracked, lambda q, p=position: q <= p)
                totals.append(size(alive) + stages[position].backward_extra_bytes)
            else:
                replay(segment, base | held_where(items, tracked, lambda q, p=position: q < p) | inputs(segment))

    def replay(segment, base):
        inner_items = items_of(segment.start, segment.stop, segment.children)
        made = {t for t in everything if segment.start <= tensors[t].producer < segment.stop}
        held = held_where(inner_items, made, lambda q: True)
        savers = [p for p, s in inner_items if s is None and holds(p, None)]
        for j in range(segment.start, max(savers) + 1 if savers else segment.start):
            run = {t for t in made if tensors[t].producer <= j and (t in held or tensors[t].last_alive >= j)}
            extra = stages[j].forward_extra_bytes + stages[segment.stop - 1].entry_extra_bytes
            totals.append(size(base | kept_outputs(segment) | run) + extra)
        walk_backward(inner_items, made, base)

    top = items_of(0, count, segments)
    held = held_where(top, set(everything), lambda q: True)
    for i in range(count):
        alive = {t for t in everything if tensors[t].producer <= i and (t in held or tensors[t].last_alive >= i)}
        totals.append(size(alive) + stages[i].forward_extra_bytes)
    walk_backward(top, set(everything), set(outliving))

    candidates = {(c.start, c.stop): c for c in problem.candidates}
    added = 0
    for segment in (s for root in segments for s in root.walk()):
        if any(i in t.holders for t in tensors for i in range(segment.start, segment.stop)):
            candidate = candidates[segment.start, segment.stop]
            kept = sum(problem.operators[o].forward_ns for o in segment.keep)
            added += max(0, candidate.replay_ns - kept + (candidate.selective_ns if segment.keep else 0))
    return max(totals), added
