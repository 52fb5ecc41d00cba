"""A context of its own for what runs inside a `with`, so that context variables set there are gone afterwards."""

from __future__ import annotations

import contextvars
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context

_ENTER = ctypes.pythonapi.PyContext_Enter
_EXIT = ctypes.pythonapi.PyContext_Exit
_ENTER.argtypes = _EXIT.argtypes = (ctypes.py_object,)


@contextmanager
def own_context(known: Context | None = None) -> Iterator[None]:
    """Run the block in a copy of a context, by default of the current one.

    It is what `contextvars.Context.run` does with a function; Python offers nothing else that takes a variable away
    which had no value before.
    """
    context = contextvars.copy_context() if known is None else known.copy()
    _ENTER(context)
    try:
        yield
    finally:
        _EXIT(context)
