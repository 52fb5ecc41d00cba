"""Which operator calls a save set counts: the one answer, for recording a step and for applying a plan.

Like `repeatable_hooks`, this imports nothing of the profiler, and the import rules name it: the applier may ask it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS


def is_counted(operator: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call counts among the calls of its operator that a save set numbers.

    Not counted are the operators that torch's selective checkpointing ignores, and casts of weights. Autocast keeps
    those for as long as its outermost context lasts, and makes no more while it has them: such a call comes in a
    forward and not in its replay, in one forward and not in the next, or the other way round. That autocast makes it
    cannot be told, for inside it is off.
    """
    if operator is torch.ops.aten._to_copy.default:
        return not (args[0].is_leaf and args[0].requires_grad)
    return operator not in SAC_IGNORED_OPS
