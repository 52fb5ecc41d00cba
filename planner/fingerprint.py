"""What identifies a model: its class, its parameters and buffers, and its modules. No values, no hashes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict
from torch import nn

from .errors import PlanMismatchError

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """Hold a parameter's or buffer's shape and dtype ('torch.float32')."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype.removeprefix('torch.')}"

    def to_text(self) -> str:
        """Return both as a plan file has them: "torch.float32 [384, 384]"."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identify the model a plan was made for.

    Attributes:
        model_class: Class name of the root.
        parameters: Facts of every parameter, by dotted name; a tied parameter once.
        buffers: Facts of every buffer, by dotted name.
        modules: Class name of every module below the root, by dotted path.
        calls: Paths of the module calls of one forward in execution order, where the profile recorded them. They
            are kept for a reader; a model that does not run cannot be compared with them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    model_class: str
    parameters: dict[str, TensorFacts] = field(default_factory=dict)
    buffers: dict[str, TensorFacts] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    calls: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, *, calls: tuple[str, ...] = ()) -> Fingerprint:
        """Take the fingerprint of a model; with DTensor parameters their global shapes count."""
        return cls(
            model_class=_class_name(model),
            parameters={name: _facts(tensor) for name, tensor in model.named_parameters()},
            buffers={name: _facts(tensor) for name, tensor in model.named_buffers()},
            modules={name: _class_name(module) for name, module in model.named_modules() if name},
            calls=calls,
        )

    def check(self, model: nn.Module) -> None:
        """Compare with a model.

        Raises:
            PlanMismatchError: Something differs; the message lists the first few names of each kind, with counts.
        """
        other = Fingerprint.of(model)
        differences = self.differences(other)
        if differences:
            inside = _wrapped(self, other)
            if inside:
                raise PlanMismatchError(
                    f"the plan was made for the model inside this {other.model_class}: apply it to {inside}"
                )
            raise PlanMismatchError(
                f"the plan was made for another model: {'; '.join(differences)}. {_advice(self, other)}"
            )

    def differences(self, other: Fingerprint) -> list[str]:
        """Say in what another model differs from this one, a line for each kind; the order of calls is left out."""
        found = (
            []
            if self.model_class == other.model_class
            else [f"class {other.model_class} instead of {self.model_class}"]
        )
        found += _differences("parameter", self.parameters, other.parameters)
        found += _differences("buffer", self.buffers, other.buffers)
        return found + _differences("module", self.modules, other.modules)


def _class_name(module: nn.Module) -> str:
    # fully_shard puts a subclass called FSDP... in place of a module's class; the model stays the same.
    kind = type(module)
    return (
        kind.__name__.removeprefix("FSDP") if any(b.__name__ == "FSDPModule" for b in kind.__mro__) else kind.__name__
    )


def _facts(tensor: object) -> TensorFacts:
    shape: tuple[int, ...] = tuple(int(size) for size in getattr(tensor, "shape", ()))
    return TensorFacts(shape=shape, dtype=str(getattr(tensor, "dtype", "")))


def _differences(kind: str, planned: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    lines = [
        _listed(f"missing {kind}s", [name for name in planned if name not in found]),
        _listed(f"extra {kind}s", [name for name in found if name not in planned]),
        _listed(
            f"changed {kind}s",
            [f"{n} is {found[n]}, planned {planned[n]}" for n in planned if n in found and planned[n] != found[n]],
        ),
    ]
    return [line for line in lines if line]


def _listed(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {title}: {', '.join(names[:_SHOWN])}{more}"


def _wrapped(planned: Fingerprint, found: Fingerprint) -> str:
    """Return how to reach the planned model in a wrapper, or a wrapper of wrappers, of it; "" where there is none."""
    path = ""
    while True:
        below = [name for name in found.modules if name.rpartition(".")[0] == path]
        if len(below) != 1:
            return ""
        path = below[0]
        if found.parameters.keys() == {f"{path}.{name}" for name in planned.parameters}:
            is_it = found.modules[path] == planned.model_class
            attributes = all(part.isidentifier() for part in path.split("."))
            return "" if not is_it else f"model.{path}" if attributes else f"model.get_submodule({path!r})"


def _advice(planned: Fingerprint, found: Fingerprint) -> str:
    if (
        {name.replace("_orig_mod.", "") for name in found.parameters}
        == planned.parameters.keys()
        != found.parameters.keys()
    ):
        return "Some of its modules were replaced by torch.compile(module): call module.compile() instead."
    if planned.parameters.keys() == found.parameters.keys():
        return "Load the configuration (and dtype) the plan was made with, or plan again."
    return "Pass the model the plan was made for, or plan again."
