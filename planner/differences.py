"""In what two plans differ, as a reader wants it: segments by pattern, then every other field that is not the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .budget import format_bytes
from .fingerprint import Fingerprint
from .patterns import Entry, groups_of, line_of
from .plan import Plan
from .segments import PlannedSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Hold in what two plans differ; false where they do not.

    Attributes:
        only_first: Segments of the first plan that the second has not, by pattern.
        only_second: The other way round.
        fields: Every other field that differs, with both values; a dot leads to a field's own fields. Of the notes
            there are those that the other has not.
    """

    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])

    def __bool__(self) -> bool:
        return bool(self.only_first or self.only_second or self.fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as plain data."""
        return {
            "only_first": list(self.only_first),
            "only_second": list(self.only_second),
            "fields": {name: list(values) for name, values in self.fields.items()},
        }

    def __str__(self) -> str:
        lines = [f"- {line}" for line in self.only_first] + [f"+ {line}" for line in self.only_second]
        words = {name: pair_words(name, values) for name, values in self.fields.items()}
        lines += [f"{name}: {first} -> {second}" for name, (first, second) in words.items()]
        return "\n".join(lines) or "no difference"


def diff(first: Plan, second: Plan) -> Differences:
    """Return in what two plans differ: segments by pattern, promises, circumstances, the model.

    Args:
        first: A plan.
        second: Another.
    """
    return Differences(
        only_first=_lines(first, second.segments),
        only_second=_lines(second, first.segments),
        fields=_fields(first, second),
    )


def pair_words(name: str, values: tuple[Any, Any]) -> tuple[str, str]:
    """Return a field's two values for people, with as many digits as it takes to tell them apart."""
    first, second = (_field_words(name, value) for value in values)
    if first != second:
        return first, second
    first, second = (_field_words(name, value, exact=True) for value in values)
    return first, second


def _field_words(name: str, value: Any, *, exact: bool = False) -> str:
    """Return a field's value for people: bytes with a unit, shares in per cent; ten digits where exact."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    digits = ".10g" if exact else ".1f"
    if name.endswith("_bytes"):
        return f"{value:,} bytes" if exact else format_bytes(value)
    if name.endswith("_range"):
        low, high = (f"{100 * share:{digits}}" for share in value)
        return f"{low} %" if low == high else f"{low} to {high} %"
    if name == "notes":
        return "; ".join(value) or "-"
    if name.endswith(("overhead", "gap", "headroom")):
        return f"{100 * value:{digits}} %"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lines(plan: Plan, others: tuple[PlannedSegment, ...]) -> tuple[str, ...]:
    known = set(others)
    mine = [segment for segment in plan.segments if segment not in known]
    return tuple(_words(group.entry) for group in groups_of(mine, plan.fingerprint))


def _words(entry: Entry) -> str:
    """Return an entry in a line: its calls, and what else it says."""
    if isinstance(entry, str):
        return entry
    kept, inside, buffers = (entry.get(name, []) for name in ("keeps", "inside", "restores"))
    said = [
        f"keeps {', '.join(kept)}" if kept else "",
        f"inside it {', '.join(map(_words, inside))}" if inside else "",
        f"restores {', '.join(buffers)}" if buffers else "",
        "replays to its end" if entry.get("to_its_end") else "",
        "with what the container computes between them" if entry.get("crosses_operators") else "",
    ]
    told = "; ".join(filter(None, said))
    return f"{line_of(entry)} ({told})" if told else line_of(entry)


def _fields(first: Plan, second: Plan) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    mine, others = _flat(first), _flat(second)
    for name in dict.fromkeys([*mine, *others]):
        values = mine.get(name), others.get(name)
        if values[0] != values[1]:
            found[name] = values
    if "notes" in found:
        one, other = found["notes"]
        found["notes"] = [n for n in one if n not in other], [n for n in other if n not in one]
    if first.fingerprint != second.fingerprint:
        found["model"] = _models(first.fingerprint, second.fingerprint)
    return found


def _models(first: Fingerprint | None, second: Fingerprint | None) -> tuple[Any, Any]:
    if first is None or second is None:
        return first and first.model_class, second and second.model_class
    return first.model_class, "; ".join(first.differences(second)) or "the same, called in another order"


def _flat(plan: Plan) -> dict[str, Any]:
    """Return a plan's fields but for segments and fingerprint, those of mappings each on its own."""
    content: dict[str, Any] = json.loads(plan.to_json())
    flat: dict[str, Any] = {}
    for item in fields(plan):
        if item.name in ("segments", "fingerprint", "schema_version"):
            continue
        value = content[item.name]
        if isinstance(value, dict):
            flat |= {f"{item.name}.{name}": inner for name, inner in value.items()}
        else:
            flat[item.name] = value
    return flat
