"""Find the model and the batch that a command is about: FILE.py:FACTORY or package.module:FACTORY."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from remat.near_names import did_you_mean
from torch import nn
from torch.utils import _pytree as pytree

from ...profiler.devices import CudaDevice
from ...profiler.step import Loss
from ..errors import PlanError
from ..patterns import matching

_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
_SHAPE = "a factory returns (model, batch) or (model, batch, loss)"


class FactoryError(PlanError):
    """Raised when a command cannot get a model and a batch from what it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Hold what a factory returned, on the device asked for."""

    model: nn.Module
    batch: Any
    loss: Loss | None

    def to(self, device: str) -> Subject:
        """Move the model and every tensor of the batch to a device.

        Raises:
            FactoryError: There is no such device here.
        """
        if device == "cuda" and not CudaDevice.is_there():
            raise FactoryError("--device cuda: torch finds no CUDA device here; use --device cpu")

        def moved(batch: object) -> object:
            return _moved(batch, device)

        make_batch = self.batch

        def sized(size: int) -> object:
            return moved(make_batch(size))

        batch = sized if callable(make_batch) else moved(make_batch)
        return Subject(model=self.model.to(device), batch=batch, loss=self.loss)

    def sized(self, size: int) -> object:
        """Return a batch of a size.

        Raises:
            FactoryError: The factory returned one batch, not a function that makes them.
        """
        if not callable(self.batch):
            raise FactoryError(
                "the factory returns one batch, and other sizes are asked for: return (model, make_batch), where "
                "make_batch takes a size to a batch"
            )
        return self.batch(size)

    def batch_words(self) -> str:
        """Return the shapes and dtypes of the batch's tensors."""
        tensors = [leaf for leaf in pytree.tree_leaves(self.batch) if isinstance(leaf, torch.Tensor)]
        return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors) or "made by size"


def modules_named(model: nn.Module, patterns: Sequence[str], option: str) -> list[nn.Module]:
    """Return the modules of a model whose paths match a pattern, in the model's order.

    Args:
        model: The model.
        patterns: Paths in which `*` stands for anything but a dot: "transformer.h.*".
        option: What the patterns were given as, for an error.

    Raises:
        FactoryError: A pattern matches nothing.
    """
    paths = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in paths if name.count(".") == pattern.count(".") and matching(pattern, name)}
        if not found:
            raise FactoryError(f"{option} {pattern!r}: no module has such a path; the model has {_few(list(paths))}")
        chosen |= found
    return [module for name, module in paths.items() if name in chosen]


def load_subject(spec: str, device: str | None = None, *, seed: int = 0) -> Subject:
    """Import a factory and call it, with torch's seed set.

    Args:
        spec: "FILE.py:FACTORY" or "package.module:FACTORY"; modules are also looked for in the current folder.
        device: "cpu" or "cuda"; None leaves everything where the factory put it.
        seed: For `torch.manual_seed`.

    Raises:
        FactoryError: There is no such factory, it raises, or it returns something else.
    """
    factory = load_function(spec)
    torch.manual_seed(seed)
    subject = _subject(_guarded(spec, factory), spec)
    return subject.to(device) if device is not None else subject


def load_batches(spec: str, device: str | None = None) -> Sequence[object]:
    """Import a function that returns batches and call it.

    Args:
        spec: "FILE.py:FUNCTION" or "package.module:FUNCTION".
        device: As in `load_subject`.

    Raises:
        FactoryError: There is no such function, it raises, or it returns no list.
    """
    batches = _guarded(spec, load_function(spec))
    if not isinstance(batches, list):
        raise FactoryError(f"{spec}: it returns a {type(batches).__name__}, not a list of batches")
    return batches if device is None else _moved(batches, device)


def load_function(spec: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        spec: "FILE.py:FUNCTION" or "package.module:FUNCTION".

    Raises:
        FactoryError: There is none.
    """
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        own = ((key, value) for key, value in vars(module).items() if not key.startswith("_"))
        known = [key for key, value in own if callable(value) and getattr(value, "__module__", "") == module.__name__]
        lacks = "is not callable" if found is not None else "is not there"
        meant = did_you_mean(name, known) or f"it has {_few(known)}"
        raise FactoryError(f"{spec}: {name} {lacks} in {place}; {meant}")
    return found


@contextmanager
def autocast(subject: Subject, asked: str | None, planned: Mapping[str, str]) -> Iterator[None]:
    """Switch autocast on as asked for on the model's device, else as a plan was made under.

    Args:
        subject: Says on which device.
        asked: "bf16", "fp16", or None.
        planned: As in `Circumstances`: by kind of device, the dtype.
    """
    kind = next((parameter.device.type for parameter in subject.model.parameters()), "cpu")
    # For a model that is not there, planned for a card, the CPU's autocast stands for the card's.
    kind = "cpu" if kind == "meta" else kind
    wanted = {kind: _PRECISIONS[asked]} if asked else planned
    with ExitStack() as stack:
        for where, dtype in wanted.items():
            stack.enter_context(torch.autocast(where, getattr(torch, dtype)))
        yield


def _moved(batch: Any, device: str) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"_remat_model_{path.stem}"
    known = sys.modules.get(name)
    # Two functions of one file see the same classes.
    if known is not None and known.__file__ == str(path):
        return known
    # As when the file is run: what lies beside it can be imported.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _guarded(str(path), lambda: cast("Any", spec.loader).exec_module(module))
    except FactoryError:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return _guarded(name, lambda: importlib.import_module(name))
    except FactoryError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and name.startswith(cause.name):
            raise FactoryError(
                f"there is no module {name!r}; pass FILE.py:FACTORY, or a module that Python can import"
            ) from None
        raise


def _guarded(what: str, run: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes one line that says where."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if len(frames) > 1 else ""
        words = " ".join(str(error).split())
        raise FactoryError(f"{what}: it raises {type(error).__name__}: {words}{where}") from error


def _subject(made: object, spec: str) -> Subject:
    parts: list[Any] = [*made] if isinstance(made, (tuple, list)) else []
    if len(parts) not in (2, 3):
        got = f"{len(parts)} values" if isinstance(made, (tuple, list)) else type(made).__name__
        raise FactoryError(f"{spec}: {_SHAPE}, got {got}")
    model, batch = parts[0], parts[1]
    loss = parts[2] if len(parts) == 3 else None
    if not isinstance(model, nn.Module):
        raise FactoryError(f"{spec}: {_SHAPE}; the model is a {type(model).__name__}, not a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise FactoryError(f"{spec}: {_SHAPE}; the loss is a {type(loss).__name__}, not a function")
    return Subject(model=model, batch=batch, loss=cast("Loss | None", loss))
