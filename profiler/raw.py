"""Objects that hold data of their own: numpy's and Python's arrays, bytearrays and files in memory."""

from __future__ import annotations

import hashlib
import io
from array import array
from typing import Any

import numpy as np

_FILES = (io.BytesIO, io.StringIO)


def is_raw(value: object) -> bool:
    """Return whether something holds data that a step may write; what is mapped from a file is left to its owner."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and not isinstance(value, np.memmap)
    return isinstance(value, (bytearray, array)) or (isinstance(value, _FILES) and not value.closed)


def nbytes_of(raw: Any) -> int:
    """Return about how many bytes it holds."""
    if isinstance(raw, np.ndarray):
        return raw.nbytes
    return len(raw.getvalue()) if isinstance(raw, _FILES) else len(raw) * getattr(raw, "itemsize", 1)


def data_of(raw: Any) -> Any:
    """Return a copy of the data; of a file its position, too."""
    return (raw.getvalue(), raw.tell()) if isinstance(raw, _FILES) else raw[:] if isinstance(raw, array) else raw.copy()


def put_data(raw: Any, data: Any) -> None:
    """Write what `data_of` returned."""
    if isinstance(raw, _FILES):
        raw.seek(0)
        raw.truncate()
        raw.write(data[0])
        raw.seek(data[1])
    elif isinstance(raw, np.ndarray):
        raw[...] = data
    else:
        raw[:] = data


def digest_of(raw: Any) -> bytes:
    """Return what tells the data from others."""
    data: Any = raw
    if isinstance(raw, np.ndarray):
        data = raw.tobytes() if raw.dtype.hasobject else np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    elif isinstance(raw, _FILES):
        data = repr(data_of(raw)).encode()
    return hashlib.blake2b(data, digest_size=16).digest()
