"""What holds for every test: one thread, and that nothing which plans disturbs what its step reaches."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from . import audit

# Operators as small as those of most tests lose more by waiting for a second thread than they gain, most of all on a
# busy machine.
torch.set_num_threads(1)


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
