"""Profile a training step: the bytes each operator saves for backward, and what each costs."""

from .torch_version import TorchVersionError

# isort: split
# After the version, what needs it.
from .dry_run import DryRunError
from .profiling import profile
from .records import Profile, ProfileFileError
from .session import Session, open_session
from .snapshot import DisturbedError
from .step import BatchError

__all__ = [
    "BatchError",
    "DisturbedError",
    "DryRunError",
    "Profile",
    "ProfileFileError",
    "Session",
    "TorchVersionError",
    "open_session",
    "profile",
]
