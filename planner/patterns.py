"""Segments as a person writes them: `transformer.h.*: ln_2 .. mlp.act` for one segment in each of the blocks.

A line names the place first and the calls after it: `place: first .. last`, `place: one, another`, or a place alone.
In a place a component of numbers may be `0-3,7`, or `*` for all there are; that is one segment for each of them. `..`
runs over all calls between two, in the order of the model's forward. `#1` after a name is its second call.
Written segments are read back before they are trusted; what does not come back the same is written in full.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from remat.near_names import did_you_mean

from .errors import PlanFileError
from .fingerprint import Fingerprint
from .segments import Call, PlannedSegment, SavedOperator

Entry = str | dict[str, Any]
"""A line, or a mapping with the line under "calls" and what else there is to say."""
_KEYS = ("calls", "keeps", "inside", "restores", "to_its_end", "crosses_operators")
_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_MOST_NUMBERS = 10_000
"""A model with longer lists of modules than this is rather a slip of the finger."""
_ROOT = "(root)"


@dataclass(frozen=True, slots=True)
class Group:
    """Hold segments that are alike but for one number in their paths.

    Attributes:
        entry: How they are written.
        segments: The segments.
    """

    entry: Entry
    segments: tuple[PlannedSegment, ...]


def line_of(entry: Entry) -> str:
    """Return the line that names an entry's calls."""
    return entry if isinstance(entry, str) else entry["calls"]


def written_alone(segment: PlannedSegment) -> Entry:
    """Write a segment with the names of its first and last call only: to be read by people, not back."""
    inside = [written_alone(child) for child in segment.children]
    return {"calls": str(segment), "inside": inside} if inside else str(segment)


def groups_of(segments: Sequence[PlannedSegment], fingerprint: Fingerprint | None) -> list[Group]:
    """Return segments as `grouped` writes them; each alone, for people only, where that could not be read back."""
    groups = grouped(segments, fingerprint)
    return groups if groups is not None else [Group(written_alone(segment), (segment,)) for segment in segments]


def kept_places(segments: Sequence[PlannedSegment], fingerprint: Fingerprint | None) -> list[str]:
    """Return the places beside those of segments, in the same lists of modules, where there are none."""
    order = _Order(fingerprint)
    numbers: dict[str, set[int]] = {}
    for segment in segments:
        shape, number = _without_number(_written(segment, order)[0])
        if number is not None:
            numbers.setdefault(shape, set()).add(number)
    found: list[str] = []
    for shape, planned in numbers.items():
        listed = {number for known, number in map(_without_number, order.modules) if known == shape}
        kept = sorted(number for number in listed if number is not None and number not in planned)
        if kept:
            found.append(_with_numbers(shape, kept, order))
    return found


def grouped(segments: Sequence[PlannedSegment], fingerprint: Fingerprint | None) -> list[Group] | None:
    """Write segments, those that are alike together; None where they could not be read back as they are."""
    order = _Order(fingerprint)
    found: dict[tuple[str, str], tuple[list[int], list[PlannedSegment]]] = {}
    entries: dict[tuple[str, str], Entry] = {}
    for segment in segments:
        place, entry = _written(segment, order)
        shape, number = _without_number(place)
        key = shape, repr(entry)
        numbers, alike = found.setdefault(key, ([], []))
        entries[key] = entry
        if number is not None:
            numbers.append(number)
        alike.append(segment)
    groups = [
        Group(_placed(entries[key], _with_numbers(key[0], numbers, order)), tuple(alike))
        for key, (numbers, alike) in found.items()
    ]
    try:
        same = read([group.entry for group in groups], fingerprint) == tuple(segments)
    except PlanFileError:
        same = False
    return groups if same else None


def read(entries: Iterable[Entry], fingerprint: Fingerprint | None) -> tuple[PlannedSegment, ...]:
    """Read segments that were written as `grouped` does, in the order of the model's forward where that is known.

    Raises:
        PlanFileError: One cannot be read, or names nothing; the message says which.
    """
    order = _Order(fingerprint)
    segments: list[PlannedSegment] = []
    lines: dict[Call, str] = {}
    for entry in entries:
        found = list(_read(entry, order))
        line = line_of(entry)
        for call in (call for segment in found for call in segment.members):
            if call in lines:
                raise PlanFileError(f"{lines[call]!r} and {line!r} both hold {call}: take one out, or narrow it")
            lines[call] = line
        segments += found
    if order.known:
        segments.sort(key=lambda segment: order.position(segment.members[0]))
    return tuple(segments)


def matching(pattern: str, path: str) -> bool:
    """Say whether a pattern names a module, or one around it: `h.*` names h.0 and all that is in it.

    `*` stands for anything but a dot, `0-3,7` for numbers.
    """
    wanted, parts = pattern.split("."), path.split(".")
    return bool(path) and len(wanted) <= len(parts) and all(map(_fits, wanted, parts))


def _fits(wanted: str, part: str) -> bool:
    if _NUMBERS.fullmatch(wanted) and part.isdecimal():
        return int(part) in _numbers(wanted)
    return fnmatchcase(part, wanted)


class _Order:
    """The calls of a model's forward, in order, as far as a fingerprint knows them."""

    def __init__(self, fingerprint: Fingerprint | None) -> None:
        counts: Counter[str] = Counter()
        self.calls: list[Call] = []
        for path in fingerprint.calls if fingerprint else ():
            self.calls.append(Call(module=path, index=counts[path]))
            counts[path] += 1
        self._positions = {call: number for number, call in enumerate(self.calls)}
        self.modules = list(fingerprint.modules) if fingerprint else []
        self._known = {*self.modules, ""}

    @property
    def known(self) -> bool:
        return bool(self.calls)

    def position(self, call: Call) -> int:
        return self._positions.get(call, len(self.calls))

    def check(self, call: Call, line: str) -> Call:
        if self.modules and call.module not in self._known:
            raise PlanFileError(f"{line!r}: the model planned for has no module {call.module!r}; check the name")
        return call

    def between(self, first: Call, last: Call, line: str) -> list[Call]:
        """Return the largest calls from one to another, both included.

        Raises:
            PlanFileError: The order of calls is not known, or one does not come after the other.
        """
        if not {first, last} <= self._positions.keys():
            raise PlanFileError(
                f"{line!r}: the fingerprint does not tell which calls are between {first} and {last}; name each, with "
                "a comma between"
            )
        members: list[Call] = []
        for call in self.calls[self.position(first) : self.position(last) + 1]:
            inside = members and call.module.startswith(f"{members[-1].module}.")
            around = not call.module or last.module.startswith(f"{call.module}.")
            if not inside and not around:
                members.append(call)
        if not members or members[-1] != last or members[0] != first:
            raise PlanFileError(f"{line!r}: {last} does not come after {first}")
        return members


def _written(segment: PlannedSegment, order: _Order) -> tuple[str, Entry]:
    """Return a segment's place, and its entry with names from there on."""
    paths = [call.module.split(".") if call.module else [] for call in segment.members]
    place = paths[0]
    for path in paths[1:]:
        place = place[: next((n for n, (a, b) in enumerate(zip(place, path, strict=False)) if a != b), len(path))]
    if any(part.isdecimal() for part in place):
        place = place[: max(number for number, part in enumerate(place) if part.isdecimal()) + 1]
    where = ".".join(place)
    return where, _relative(segment, where, order)


def _relative(segment: PlannedSegment, where: str, order: _Order) -> Entry:
    members = segment.members
    names = [_name(call, where) for call in members]
    try:
        run = len(members) > 2 and order.between(members[0], members[-1], "") == [*members]
    except PlanFileError:
        run = False
    line = f"{names[0]} .. {names[-1]}" if run else ", ".join(names)
    buffers = [_under(name, where) or f"/{name}" for name in segment.restored_buffers]
    extra = {
        "keeps": [_counted(kept.operator, kept.index) for kept in segment.save],
        "inside": [_relative(child, where, order) for child in segment.children],
        "restores": buffers,
        "to_its_end": not segment.early_stop,
        "crosses_operators": segment.crosses_operators,
    }
    said = {name: value for name, value in extra.items() if value}
    return {"calls": line, **said} if said else line


def _name(call: Call, where: str) -> str:
    if call.module == where:
        return _counted("" if where else _ROOT, call.index)
    return _counted(_under(call.module, where) or f"/{call.module}", call.index)


def _under(name: str, where: str) -> str:
    """Return a name from a place on; "" where it is elsewhere."""
    return name if not where else name[len(where) + 1 :] if name.startswith(f"{where}.") else ""


def _counted(name: str, index: int) -> str:
    return name if index == 0 else f"{name}#{index}"


def _placed(entry: Entry, place: str) -> Entry:
    """Put the place before an entry's line."""
    line = line_of(entry)
    line = f"{place}: {line}" if place and line and not line.startswith("#") else f"{place}{line}"
    return line if isinstance(entry, str) else {**entry, "calls": line}


def _without_number(place: str) -> tuple[str, int | None]:
    """Take the last number out of a place."""
    parts = place.split(".")
    for position in reversed(range(len(parts))):
        if parts[position].isdecimal():
            number = int(parts[position])
            parts[position] = "\0"
            return ".".join(parts), number
    return place, None


def _with_numbers(shape: str, numbers: list[int], order: _Order) -> str:
    if not numbers:
        return shape
    found = sorted(set(numbers))
    star = shape.replace("\0", "*")
    known = {path for path in order.modules if len(path.split(".")) == len(shape.split(".")) and matching(star, path)}
    if len(found) > 1 and known == {shape.replace("\0", str(number)) for number in found}:
        return star
    runs: list[list[int]] = []
    for number in found:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return shape.replace("\0", ",".join(texts))


def _read(entry: object, order: _Order) -> Iterator[PlannedSegment]:
    facts, line = _facts(entry)
    place, colon, calls = line.partition(": ")
    if not colon:
        single = ", " not in line and " .. " not in line and not line.startswith(_ROOT)
        place, mark, index = line.partition("#") if single else ("", "", "")
        calls = f"{mark}{index}" if single else line
    for where in _places(place, order, line):
        yield _segment(facts, where, calls, order, line)


def _facts(entry: object) -> tuple[dict[str, Any], str]:
    """Return what an entry says, and its line.

    Raises:
        PlanFileError: It is neither a line nor such a mapping.
    """
    facts: dict[Any, Any] = {"calls": entry} if isinstance(entry, str) else entry if isinstance(entry, dict) else {}
    unknown = [str(key) for key in facts if key not in _KEYS]
    if unknown or "calls" not in facts:
        what = f"{unknown[0]!r} is none of them" if unknown else f"got {_short(entry)}"
        close = did_you_mean(unknown[0], _KEYS) if unknown else ""
        raise PlanFileError(
            f"a segment is a line, or a mapping with {', '.join(_KEYS)}: {what}{close and f'; {close}'}"
        )
    if not isinstance(facts["calls"], str):
        raise PlanFileError(f"calls is text like 'blocks.9', got a {type(facts['calls']).__name__}: {_short(entry)}")
    return facts, facts["calls"]


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _segment(facts: dict[str, Any], where: str, calls: str, order: _Order, line: str) -> PlannedSegment:
    members: list[Call] = []
    for item in calls.split(", "):
        first, dots, last = item.partition(" .. ")
        begin = order.check(_call(first, where), line)
        members += order.between(begin, order.check(_call(last, where), line), line) if dots else [begin]
    segment = PlannedSegment(
        members=tuple(members),
        save=tuple(_operator(name, line) for name in _texts(facts, "keeps", line)),
        restored_buffers=tuple(_absolute(name, where) for name in _texts(facts, "restores", line)),
        early_stop=not facts.get("to_its_end", False),
        crosses_operators=bool(facts.get("crosses_operators", False)),
    )
    # Names of nested segments begin where those of the segment around them do.
    inside = [_facts(entry) for entry in _listed(facts, "inside", line)]
    children = tuple(_segment(said, where, names, order, names) for said, names in inside)
    return replace(segment, children=children)


def _places(pattern: str, order: _Order, line: str) -> list[str]:
    """Return the places that a pattern names, numbers ascending.

    Raises:
        PlanFileError: It names none.
    """
    parts = pattern.split(".")
    if "*" in pattern:
        same_depth = (path for path in order.modules if path.count(".") == pattern.count("."))
        found = [path for path in same_depth if matching(pattern, path)]
        if not found:
            raise PlanFileError(f"{line!r}: no module of the model planned for has a path like {pattern!r}")
        return found
    choices = [
        [str(n) for n in _numbers(part)] if _NUMBERS.fullmatch(part) and not part.isdecimal() else [part]
        for part in parts
    ]
    return [".".join(chosen) for chosen in product(*choices)]


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        if not 0 <= int(last or first) - int(first) < _MOST_NUMBERS:
            raise PlanFileError(f"{text!r}: {run} is no run of numbers, from the smaller to the larger")
        found += range(int(first), int(last or first) + 1)
    return found


def _joined(around: str, name: str) -> str:
    return f"{around}.{name}" if around and name else around or name


def _absolute(name: str, where: str) -> str:
    return name[1:] if name.startswith("/") else _joined(where, name)


def _call(name: str, where: str) -> Call:
    path, mark, index = name.partition("#")
    if mark and not index.isdecimal():
        raise PlanFileError(f"{name!r}: after # comes the number of a call, from 0")
    module = "" if path == _ROOT else _absolute(path, where)
    return Call(module=module, index=int(index or 0))


def _operator(name: str, line: str) -> SavedOperator:
    operator, mark, index = name.partition("#")
    if mark and not index.isdecimal():
        raise PlanFileError(f"{line!r}: {name!r}: after # comes the number of the operator's call, from 0")
    return SavedOperator(operator=operator, index=int(index or 0))


def _texts(facts: dict[str, Any], key: str, line: str) -> list[str]:
    values = _listed(facts, key, line)
    if not all(isinstance(value, str) for value in values):
        raise PlanFileError(f"{line!r}: {key!r} must be a list of names, got {_short(values)}")
    return values


def _listed(facts: dict[str, Any], key: str, line: str) -> list[Any]:
    values = facts.get(key, [])
    if not isinstance(values, list):
        raise PlanFileError(f"{line!r}: {key!r} must be a list, got {_short(values)}")
    return values
