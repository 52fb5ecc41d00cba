"""Which operators a segment may keep the outputs of. A new rule is one more function in `RULES`."""

from __future__ import annotations

from collections.abc import Callable

from ...profiler.records import Profile
from ...profiler.step_record import Operator

SAVABLE = 5e-4
"""An operator that takes less than this share of the forward is not worth naming in a save set."""


def _makes_something(_: Profile, operator: Operator) -> bool:
    """Views and in-place operators make nothing that could be kept."""
    return bool(operator.produces)


def _can_be_named(_: Profile, operator: Operator) -> bool:
    """Torch's selective checkpointing ignores some operators, so a count of calls would not find them."""
    return operator.counted


def _draws_nothing(_: Profile, operator: Operator) -> bool:
    """A replay without its draws would leave the random state behind for those that follow."""
    return not operator.is_random


def _stays_unchanged(profile: Profile, operator: Operator) -> bool:
    """What is written in place, then or later, is not what the operator returned."""
    return not operator.writes and all(not profile.storages[s].written_by for s in operator.produces)


def _is_worth_it(profile: Profile, operator: Operator) -> bool:
    return operator.forward_ns >= SAVABLE * profile.forward_ns


def _is_an_activation(profile: Profile, operator: Operator) -> bool:
    """What ranks gather and send is freed and filled again behind a save set's back."""
    return all(profile.storages[s].kind == "activation" for s in operator.produces)


RULES: tuple[Callable[[Profile, Operator], bool], ...] = (
    _makes_something,
    _can_be_named,
    _draws_nothing,
    _stays_unchanged,
    _is_an_activation,
    _is_worth_it,
)


def may_be_kept(profile: Profile, operator: Operator) -> bool:
    """Say whether a save set may name an operator, however little that saves."""
    return all(rule(profile, operator) for rule in RULES if rule is not _is_worth_it)


def savable(profile: Profile) -> list[int]:
    """Return the operators of the forward that all rules let a save set name.

    Which of them a segment keeps is the solver's choice: `ilp` decides operator by operator, the others weigh the few
    sets a candidate that `solvers.chain.save_options` makes of them.
    """
    operators = profile.operators[: profile.loss_stop]
    return [k for k, operator in enumerate(operators) if all(rule(profile, operator) for rule in RULES)]
