"""What holds for every test: one thread, and that nothing which plans disturbs what its step reaches."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from . import audit

# Operators as small as those of most tests lose more by waiting for a second thread than they gain, most of all on a
# busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_before_is_not_searched_for_garbage():
    """Leave what a module of tests finds (libraries, above all) out of every collection in it.

    The library collects garbage before it measures, and the audit below looks through all objects: with everything
    imported that takes longer than most tests.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_disturbed(monkeypatch):
    """Compare what a step reaches before and after every profile, plan, verification and so on, by another walk.

    All of them run inside `Guard.undisturbed`; the outermost is looked at.
    """
    from remat.profiler.guard import Guard

    undisturbed = Guard.undisturbed

    @contextmanager
    def audited(self):
        if self._first is not None:
            with undisturbed(self):
                yield
            return
        before, known = audit.picture(*self.roots.values()), audit.alive_fakes()
        try:
            with undisturbed(self):
                yield
        finally:
            assert audit.differences(before, audit.picture(*self.roots.values())) == []
        assert audit.new_fakes(known) == []

    monkeypatch.setattr(Guard, "undisturbed", audited)
