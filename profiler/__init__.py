"""Profile a training step: the bytes each operator saves for backward, and what each costs."""

from .dry_run import DryRunError
from .profiling import Session, open_session, profile
from .records import Profile, ProfileFileError
from .snapshot import DisturbedError
from .step import BatchError

__all__ = [
    "BatchError",
    "DisturbedError",
    "DryRunError",
    "Profile",
    "ProfileFileError",
    "Session",
    "open_session",
    "profile",
]
