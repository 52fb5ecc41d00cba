"""After a dry run no fake tensor may be alive: find those that are, and take them out of what keeps them."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from typing import Any

import torch

from .internals import FakeTensor, FakeTensorMode, is_cached_function
from .snapshot import DisturbedError

_ROUNDS = 3
"""How often what is alive is looked for again: what one round frees may show who holds the rest."""
_HOLDS_ONE = (tuple, frozenset, types.CellType, functools.partial, types.MethodType)


def take_out(mode: FakeTensorMode) -> list[str]:
    """Take the fake tensors of a mode that are alive out of what keeps them; say in words what that was.

    An entry of a dictionary, list or set that came with the dry run is a cache's; without it, it is made again. What
    the step reaches was put back before; this is about what only, say, a function cached by lru_cache reaches.

    Raises:
        DisturbedError: One is kept as an attribute or a variable, whose value before is not known.
    """
    # Autocast keeps the weights it cast until its context is left.
    torch.clear_autocast_cache()
    if not _alive(mode):
        return []
    # Cycles of the run's own (sharded parameters are in some) go without a look at what was there before it.
    gc.collect()
    if not _alive(mode):
        return []
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    words: list[str] = []
    stuck: list[str] = []
    for _ in range(_ROUNDS):
        gc.collect()
        fakes = _alive(mode)
        if not fakes:
            break
        _release(fakes, words, stuck)
        del fakes
    gc.collect()
    left = len(_alive(mode))
    if frozen:
        gc.freeze()
    if left:
        where = "; ".join(dict.fromkeys(stuck)) or "an object of a compiled extension"
        raise DisturbedError(
            f"{left} fake tensors of a dry run are kept by {where}. Let them be made in one real forward before "
            "planning, or keep them in an attribute of a module, which is put back; where forward calls a compiled "
            "function (torch.compile), plan before it is compiled"
        )
    return list(dict.fromkeys(words))


def _alive(mode: FakeTensorMode) -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), FakeTensor) and one.fake_mode is mode]


def _release(fakes: list[Any], words: list[str], stuck: list[str]) -> None:
    """Remove values, and the tuples and the like that hold them, from every container that refers to them."""
    kept = set(map(id, fakes))
    known = {id(fakes)}
    layer: list[Any] = fakes
    while layer:
        # One pass through all objects for each layer: this is slow.
        holders = gc.get_referrers(*layer)
        known |= {id(layer), id(holders)}
        layer = []
        for holder in holders:
            if id(holder) in known:
                continue
            known.add(id(holder))
            if is_cached_function(holder):
                holder.cache_clear()
                words.append(f"the cache of {holder.__wrapped__.__qualname__}")
            elif isinstance(holder, _HOLDS_ONE):
                kept.add(id(holder))
                layer.append(holder)
            else:
                _release_from(holder, kept, words, stuck)
        del holders


def _release_from(holder: Any, kept: set[int], words: list[str], stuck: list[str]) -> None:
    if isinstance(holder, dict):
        keys = [key for key, item in dict.items(holder) if id(item) in kept]
        owners = [owner for owner in gc.get_referrers(holder) if getattr(owner, "__dict__", None) is holder]
        if owners:
            stuck += [f"{getattr(owners[0], '__name__', type(owners[0]).__name__)}.{key}" for key in keys]
            return
        for key in keys:
            del holder[key]
            words.append(f"a dictionary's entry {key!r:.60}")
    elif isinstance(holder, (list, set, deque)):
        items = [item for item in holder if id(item) not in kept]
        holder.clear()
        holder.update(items) if isinstance(holder, set) else holder.extend(items)
        words.append(f"a {type(holder).__name__}")
    elif not isinstance(holder, (FakeTensor, FakeTensorMode, types.FrameType)):
        names = [key for key, item in getattr(holder, "__dict__", {}).items() if id(item) in kept]
        stuck += [f"{type(holder).__name__}.{name}" for name in names]
