"""A plan as data and as a file: which calls are checkpointed, what is kept, and what was promised.

A plan holds names and numbers only. It knows nothing of profiles, solvers or how a plan is carried out.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pandas as pd
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from remat.near_names import did_you_mean
from remat.whole_file import write_whole

from .circumstances import Circumstances, Count
from .errors import PlanFileError
from .fingerprint import Fingerprint
from .patterns import Entry, Group, grouped, groups_of, kept_places, read
from .plan_words import bytes_words, group_lines, headline, percent_range
from .segments import STRICT, Call, PlannedSegment, SavedOperator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure
    from torch import nn

__all__ = ["SCHEMA_VERSION", "BatchTensor", "Call", "Plan", "PlannedBatch", "PlannedSegment", "SavedOperator"]

SCHEMA_VERSION = 3
Source = Literal["measured", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensor:
    """Describe one tensor of the sample batch: its name (an argument's), shape, dtype and device."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str


def shape_words(tensors: tuple[BatchTensor, ...]) -> str:
    """Return the names, dtypes and shapes of a batch's tensors: "input_ids int64 [8, 128]"."""
    return ", ".join(f"{t.name} {t.dtype.removeprefix('torch.')} {list(t.shape)}" for t in tensors) or "no tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """Say what a plan for several batches does with one of them.

    Attributes:
        tensors: The batch's tensors.
        predicted_peak_bytes: Peak of the planned step with it.
        unplanned_peak_bytes: The same without a plan.
        predicted_overhead: Replayed forward time by the unplanned step's time, both with this batch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    tensors: tuple[BatchTensor, ...]
    predicted_peak_bytes: Count | None
    unplanned_peak_bytes: Count | None
    predicted_overhead: float | None

    def __str__(self) -> str:
        return (
            f"with {shape_words(self.tensors)}: peak {bytes_words(self.predicted_peak_bytes)} (unplanned "
            f"{bytes_words(self.unplanned_peak_bytes)}), added time {percent_range(self.predicted_overhead, None)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Hold the segments to checkpoint and everything that was promised about them.

    Bytes are peaks of the whole step. An overhead is added time, as a share of the unplanned step's (0.1 is 10 %).

    Attributes:
        segments: Top-level segments, disjoint, in execution order.
        training: The root's training flag the plan is for; with the other one nothing is checkpointed.
        ranks: Processes that the model will be sharded over; where there are several, bytes are those of one of them.
        units: Paths of the modules that will be sharded on their own.
        budget_bytes: The budget asked for, headroom included; None where none was given.
        predicted_peak_bytes: Peak of the planned step, from the dry run.
        predicted_overhead: Replayed forward time by the unplanned step's time.
        predicted_overhead_range: The least and the most it would be by the spread of the profile's repeats.
        measured_overhead: What the plan was measured to add, in turn with the unplanned step, where plans were raced.
        measured_overhead_range: The least and the most of it over the rounds.
        unrestricted_overhead: Likewise of the best plan found that need not treat blocks alike, where that was asked.
        unplanned_peak_bytes: Peak of the step without a plan.
        lower_bound_overhead: No plan under the budget costs less, as far as the solver proved.
        gap: How far predicted_overhead may be above the optimum, relative; 0 where proven optimal.
        solver: The solver that found the plan.
        status: The solver's status (optimal, feasible, time limit).
        circumstances: How the step is run that the figures hold for: precision, optimizer, accumulation, ...
        bytes_from: Whether bytes were measured or estimated.
        times_from: Whether times were measured or estimated.
        fingerprint: The model planned for; None for a plan written by hand, which is then not compared.
        batch: The sample batch's tensors; of several batches the one with the largest peak, which the figures are for.
        batches: Where it was planned for several batches: each, with its figures.
        versions: Versions of the libraries that made the plan.
        notes: Remarks for a reader, like why a module was left out.
        schema_version: Version of this file format.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    segments: tuple[PlannedSegment, ...]
    training: bool = True
    ranks: Annotated[int, Field(ge=1)] = 1
    units: tuple[str, ...] = ()
    budget_bytes: Count | None = None
    predicted_peak_bytes: Count | None = None
    predicted_overhead: float | None = None
    predicted_overhead_range: tuple[float, float] | None = None
    measured_overhead: float | None = None
    measured_overhead_range: tuple[float, float] | None = None
    unrestricted_overhead: float | None = None
    unplanned_peak_bytes: Count | None = None
    lower_bound_overhead: float | None = None
    gap: float | None = None
    solver: str = ""
    status: str = ""
    circumstances: Circumstances = field(default_factory=Circumstances)
    bytes_from: Source = "estimated"
    times_from: Source = "estimated"
    fingerprint: Fingerprint | None = None
    batch: tuple[BatchTensor, ...] = ()
    batches: tuple[PlannedBatch, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Return the plan as JSON for people: a summary, then segments by pattern, then figures; the fingerprint last.

        Segments may be edited: lines added, taken away or narrowed; `planner/patterns.py` says how they are written.
        The summary is for a reader and is not read back.
        """
        content: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        groups = grouped(self.segments, self.fingerprint)
        in_full = content.pop("segments")
        segments = in_full if groups is None else [group.entry for group in groups]
        fingerprint: Any = content.pop("fingerprint")
        for kind in ("parameters", "buffers") if self.fingerprint is not None else ():
            facts = getattr(self.fingerprint, kind)
            fingerprint[kind] = {name: fact.to_text() for name, fact in facts.items()}
        version = content.pop("schema_version")
        ordered = {"schema_version": version, "summary": headline(self), "segments": segments, **content}
        return _laid_out({**ordered, "fingerprint": fingerprint})

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "plan") -> Plan:
        """Read a plan from JSON.

        Args:
            text: What `to_json` wrote, as it was or edited.
            source: What to call the text in an error.

        Raises:
            PlanFileError: The text is not a plan of this schema; the message names the field.
        """
        content = _content(text, source)
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            raise PlanFileError(
                f"{source}: schema_version is {version!r}, this remat reads {SCHEMA_VERSION}; "
                "make the plan again, or use the remat version it names under 'versions'"
            )
        content.pop("summary", None)
        entries = content["segments"]
        by_pattern = [_is_by_pattern(entry) for entry in entries] if isinstance(entries, list) else []
        if by_pattern:
            stand_in: dict[str, Any] = {"members": [{"module": "", "index": 0}]}
            content["segments"] = [stand_in if n else e for n, e in zip(by_pattern, entries, strict=True)]
        _spell_out(content.get("fingerprint"))
        try:
            plan = _ADAPTER.validate_json(json.dumps(content))
        except ValidationError as error:
            raise PlanFileError(_one_line(error, source)) from None
        try:
            segments = _segments(plan, entries, by_pattern)
        except PlanFileError as error:
            raise PlanFileError(f"{source}: field segments: {error}; undo the edit or make the plan again") from None
        return replace(plan, segments=segments)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            PlanFileError: The folder does not exist.
        """
        target = Path(path)
        if not target.parent.is_dir():
            raise PlanFileError(f"cannot write {target}: there is no folder {target.parent}; make it first")
        write_whole(target, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            PlanFileError: The file cannot be read, or is not a plan of this schema.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise PlanFileError(f"{path}: cannot read the plan file: {reason}; check the path") from None
        return cls.from_json(text, source=str(path))

    def check(self, model: nn.Module) -> None:
        """Compare the fingerprint with a model; a plan without one is not compared.

        Raises:
            PlanMismatchError: The model is another one; the message says what differs.
        """
        if self.fingerprint is not None:
            self.fingerprint.check(model)

    def promise_for(self, tensors: tuple[BatchTensor, ...]) -> PlannedBatch | None:
        """Return what was promised for a batch of these very shapes; None where it was not among those planned for."""
        own = PlannedBatch(
            tensors=self.batch,
            predicted_peak_bytes=self.predicted_peak_bytes,
            unplanned_peak_bytes=self.unplanned_peak_bytes,
            predicted_overhead=self.predicted_overhead,
        )
        wanted = [(tensor.name, tensor.shape) for tensor in tensors]
        known = (entry for entry in (own, *self.batches) if [(t.name, t.shape) for t in entry.tensors] == wanted)
        return next(known, None)

    def groups(self) -> list[Group]:
        """Return the segments as they are written: those that differ in one number of their paths together."""
        return groups_of(self.segments, self.fingerprint)

    def to_frame(self) -> pd.DataFrame:
        """Return one row a segment, nested ones after the one around them.

        Columns: `segment` (the top-level segment's number), `depth`, `first` and `last` call, `calls` (how many),
        `saved_operators`, `restored_buffers`, `early_stop` and `crosses_operators`.
        """
        columns = ["segment", "depth", "first", "last", "calls"]
        columns += ["saved_operators", "restored_buffers", "early_stop", "crosses_operators"]
        rows = [row for number, segment in enumerate(self.segments) for row in _rows(segment, number, 0)]
        return pd.DataFrame(rows, columns=columns)

    def plot(self, *, title: str = "") -> Figure:
        """Draw the peak and what is done to each call; a planner draws bytes and times too, `planner.strip(plan)`."""
        from .pictures.outline import plan_outline

        return plan_outline(self, title=title)

    def describe(self) -> str:
        """Return the plan as a few lines of text: promises first, then the segments by pattern."""
        lines = [headline(self), *(f"  {entry}" for entry in self.batches)]
        for group in self.groups():
            lines += group_lines(group.entry, group.segments[0], len(group.segments), 1)
        if self.circumstances.alike:
            lines += [f"  {place}: kept" for place in kept_places(self.segments, self.fingerprint)]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<{headline(self).partition(';')[0]}>"

    def _repr_html_(self) -> str:
        """Return the text as HTML, which notebooks show."""
        first, *others = self.describe().splitlines()
        rest = f'<pre style="white-space: pre-wrap">{escape(chr(10).join(others))}</pre>' if others else ""
        return f"<p><b>{escape(first)}</b></p>{rest}"


_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)
_ANY: TypeAdapter[object] = TypeAdapter(object)
_BY_LINE = ("segments", "batch", "batches", "notes")
"""Lists of which every entry has a line of its own."""


def _laid_out(content: dict[str, Any]) -> str:
    """Write JSON with a line for each field, and for each entry of what people read."""
    lines: list[str] = []
    for name, value in content.items():
        if name in _BY_LINE and value:
            entries = ",\n".join(f"    {json.dumps(entry, ensure_ascii=False)}" for entry in value)
            lines.append(f"  {json.dumps(name)}: [\n{entries}\n  ]")
        elif name == "fingerprint" and value:
            parts = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            lines.append(f"  {json.dumps(name)}: {{\n{parts}\n  }}")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _content(text: str | bytes, source: str) -> dict[str, Any]:
    try:
        content: Any = _ANY.validate_json(text)
    except ValidationError as error:
        reason = re.sub(r"^Invalid JSON: ", "", error.errors()[0]["msg"])
        raise PlanFileError(f"{source}: not JSON ({reason}); the file is truncated or no plan, make it again") from None
    if not isinstance(content, dict) or "segments" not in content:
        known = {item.name for item in fields(Plan)}
        strange = [name for name in content if name not in known] if isinstance(content, dict) else []
        near = next((name for name in strange if did_you_mean(name, ["segments"])), "")
        if near:
            raise PlanFileError(f"{source}: unknown field {near!r}, and no field 'segments'; did you mean 'segments'?")
        raise PlanFileError(f"{source}: no field 'segments', so this is no plan file; pass what Plan.save wrote")
    return content


def _is_by_pattern(entry: object) -> bool:
    return isinstance(entry, str) or (isinstance(entry, dict) and "members" not in entry)


def _spell_out(fingerprint: Any) -> None:
    """Put tensors' facts, written as a text, into the fields that they stand for."""
    for kind in ("parameters", "buffers"):
        facts: Any = fingerprint.get(kind) if isinstance(fingerprint, dict) else None
        for name, text in facts.items() if isinstance(facts, dict) else ():
            dtype, _, shape = str(text).partition(" ")
            sizes = shape.strip("[]").split(", ") if shape != "[]" else []
            if isinstance(text, str) and all(size.isdecimal() for size in sizes):
                facts[name] = {"dtype": dtype, "shape": [int(size) for size in sizes]}


def _segments(plan: Plan, entries: list[Entry], by_pattern: list[bool]) -> tuple[PlannedSegment, ...]:
    """Return the segments of a plan whose entries by pattern were left out."""
    if all(by_pattern):
        return read(entries, plan.fingerprint)
    segments: list[PlannedSegment] = []
    for entry, segment, pattern in zip(entries, plan.segments, by_pattern, strict=True):
        segments += read([entry], plan.fingerprint) if pattern else [segment]
    return tuple(segments)


def _one_line(error: ValidationError, source: str) -> str:
    problems = error.errors(include_url=False, include_input=True)
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"]) or "plan"
    value = re.sub(r"\s+", " ", repr(first["input"]))
    value = value if len(value) <= 60 else value[:57] + "..."
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "unexpected_keyword_argument":
        kinds: dict[Any, Any] = {"circumstances": Circumstances, "segments": PlannedSegment, "fingerprint": Fingerprint}
        kind = Plan if len(first["loc"]) == 1 else kinds.get(first["loc"][0])
        close = did_you_mean(str(first["loc"][-1]), (item.name for item in fields(kind))) if kind else ""
        return f"{source}: unknown field {place}{more}; {close or 'undo the edit or make the plan again'}"
    return f"{source}: field {place}: {first['msg']}, got {value}{more}; undo the edit or make the plan again"


def _rows(segment: PlannedSegment, number: int, depth: int) -> Iterator[tuple[object, ...]]:
    first, last = str(segment.members[0]), str(segment.members[-1])
    counts = len(segment.members), len(segment.save), len(segment.restored_buffers)
    yield number, depth, first, last, *counts, segment.early_stop, segment.crosses_operators
    for child in segment.children:
        yield from _rows(child, number, depth + 1)
