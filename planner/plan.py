"""A plan as data and as a file: which calls are checkpointed, what is kept, and what was promised.

A plan holds names and numbers only. It knows nothing of profiles, solvers or how a plan is carried out.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from .circumstances import Circumstances, Count
from .errors import PlanFileError
from .fingerprint import Fingerprint

if TYPE_CHECKING:
    from torch import nn

SCHEMA_VERSION = 2
_STRICT = ConfigDict(extra="forbid", strict=True)
Source = Literal["measured", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Name one call of a module within one forward of the root model.

    `module` is the dotted path of the module, "" for the root; `index` counts its calls from 0.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    module: str
    index: Count = 0

    def __str__(self) -> str:
        name = self.module or "(root)"
        return name if self.index == 0 else f"{name}#{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOperator:
    """Name one operator call whose outputs a segment keeps.

    `operator` is str() of the OpOverload, like 'aten.addmm.default'. `index` counts the calls of that operator over
    one run of the segment from 0, as torch's selective checkpointing counts: every dispatched call of it, also inside
    child segments, except the operators it ignores (`SAC_IGNORED_OPS`: detach and metadata reads).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    operator: str
    index: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """Describe one checkpointed segment: sibling calls of one parent, replayed together in backward.

    The segment runs from the beginning of the first member's call to the end of the last member's.

    Attributes:
        members: Calls made by the same parent module, in execution order.
        save: The save set: operators whose outputs are kept instead of replayed.
        children: Segments nested inside, each within one member or a shorter run of the members.
        early_stop: Whether a replay ends at its last saved tensor.
        restored_buffers: Dotted names of buffers the segment writes; a replay leaves them as they are.
        crosses_operators: Whether the parent runs operators of its own between the members.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    members: Annotated[tuple[Call, ...], Field(min_length=1)]
    save: tuple[SavedOperator, ...] = ()
    children: tuple[PlannedSegment, ...] = ()
    early_stop: bool = True
    restored_buffers: tuple[str, ...] = ()
    crosses_operators: bool = False

    def walk(self) -> Iterator[PlannedSegment]:
        """Yield this segment, then everything nested in it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def __str__(self) -> str:
        first, last = self.members[0], self.members[-1]
        return str(first) if len(self.members) == 1 else f"{first} .. {last} ({len(self.members)} calls)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensor:
    """Describe one tensor of the sample batch: its name (an argument's), shape, dtype and device."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Hold the segments to checkpoint and everything that was promised about them.

    Bytes are peaks of the whole step. Overheads are fractions of the unplanned step's time (0.1 is 10 %).

    Attributes:
        segments: Top-level segments, disjoint, in execution order.
        training: The root's training flag the plan is for; with the other one nothing is checkpointed.
        ranks: Processes that the model will be sharded over; where there are several, bytes are those of one of them.
        units: Paths of the modules that will be sharded on their own.
        budget_bytes: The budget asked for, headroom included; None where none was given.
        predicted_peak_bytes: Peak of the planned step, from the dry run.
        predicted_overhead: Replayed forward time by the unplanned step's time.
        unplanned_peak_bytes: Peak of the step without a plan.
        lower_bound_overhead: No plan under the budget costs less, as far as the solver proved.
        gap: How far predicted_overhead may be above the optimum, relative; 0 where proven optimal.
        solver: The solver that found the plan.
        status: The solver's status (optimal, feasible, time limit).
        circumstances: How the step is run that the figures hold for: precision, optimizer, accumulation, ...
        bytes_from: Whether bytes were measured or estimated.
        times_from: Whether times were measured or estimated.
        fingerprint: The model planned for; None for a plan written by hand, which is then not compared.
        batch: The sample batch's tensors.
        versions: Versions of the libraries that made the plan.
        notes: Remarks for a reader, like why a module was left out.
        schema_version: Version of this file format.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    segments: tuple[PlannedSegment, ...]
    training: bool = True
    ranks: Annotated[int, Field(ge=1)] = 1
    units: tuple[str, ...] = ()
    budget_bytes: Count | None = None
    predicted_peak_bytes: Count | None = None
    predicted_overhead: float | None = None
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
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return _ADAPTER.dump_json(self, indent=2).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "plan") -> Plan:
        """Read a plan from JSON.

        Args:
            text: What `to_json` wrote.
            source: What to call the text in an error.

        Raises:
            PlanFileError: The text is not a plan of this schema; the message names the field.
        """
        version = _schema_version(text, source)
        if version != SCHEMA_VERSION:
            raise PlanFileError(
                f"{source}: schema_version is {version!r}, this remat reads {SCHEMA_VERSION}; "
                "make the plan again, or use the remat version it names under 'versions'"
            )
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise PlanFileError(_one_line(error, source)) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            PlanFileError: The folder does not exist.
        """
        target = Path(path)
        if not target.parent.is_dir():
            raise PlanFileError(f"cannot write {target}: there is no folder {target.parent}; make it first")
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes a private file; a plan is meant to be read by all ranks and colleagues.
            Path(name).chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

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

    def describe(self) -> str:
        """Return the plan as a few lines of text: promises first, then the segments as a tree."""
        lines = [_headline(self)]
        for segment in self.segments:
            lines += _segment_lines(segment, 1)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def __str__(self) -> str:
        return self.describe()


_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)
_ANY: TypeAdapter[object] = TypeAdapter(object)


def _schema_version(text: str | bytes, source: str) -> object:
    try:
        content = _ANY.validate_json(text)
    except ValidationError as error:
        reason = re.sub(r"^Invalid JSON: ", "", error.errors()[0]["msg"])
        raise PlanFileError(f"{source}: not JSON ({reason}); the file is truncated or no plan, make it again") from None
    if not isinstance(content, dict) or "segments" not in content:
        raise PlanFileError(f"{source}: no field 'segments', so this is no plan file; pass what Plan.save wrote")
    return content.get("schema_version")


def _one_line(error: ValidationError, source: str) -> str:
    problems = error.errors(include_url=False, include_input=True)
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"]) or "plan"
    value = re.sub(r"\s+", " ", repr(first["input"]))
    value = value if len(value) <= 60 else value[:57] + "..."
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{source}: field {place}: {first['msg']}, got {value}{more}; undo the edit or make the plan again"


def _mebibytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:,.1f} MiB"


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100 * fraction:.1f} %"


def _headline(plan: Plan) -> str:
    each = f" per rank, {plan.ranks} ranks" if plan.ranks > 1 else ""
    return (
        f"plan: {len(plan.segments)} segments, peak {_mebibytes(plan.predicted_peak_bytes)}{each} "
        f"(unplanned {_mebibytes(plan.unplanned_peak_bytes)}, budget {_mebibytes(plan.budget_bytes)}), "
        f"overhead {_percent(plan.predicted_overhead)}; solver {plan.solver or 'none'} {plan.status}; "
        f"bytes {plan.bytes_from}, times {plan.times_from}; {plan.circumstances.precision}, "
        f"{plan.circumstances.output_words}"
    )


def _segment_lines(segment: PlannedSegment, depth: int) -> list[str]:
    facts = [f"keeps the outputs of {len(segment.save)} operators"] if segment.save else []
    facts += ["replays to its end"] if not segment.early_stop else []
    facts += [f"restores {len(segment.restored_buffers)} buffers"] if segment.restored_buffers else []
    facts += ["with what the container computes between them"] if segment.crosses_operators else []
    lines = ["  " * depth + ": ".join([str(segment)] + ([", ".join(facts)] if facts else []))]
    for child in segment.children:
        lines += _segment_lines(child, depth + 1)
    return lines
