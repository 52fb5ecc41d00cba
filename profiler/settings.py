"""Random states, the process's and private ones, and the settings of torch and numpy that a step may change."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


def state_of(generator: Any) -> Any:
    """Return the state of a private generator of torch, Python or numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    """Set what `state_of` returned."""
    if isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


class Setting(NamedTuple):
    """One of the process's settings: how it is read, and how it is written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    return (state[0], state[1].tobytes(), *state[2:])


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    np.random.set_state((state[0], np.frombuffer(state[1], dtype=np.uint32), *state[2:]))


def _set_errors(errors: Any) -> None:
    np.seterr(**errors)


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly_mode(mode: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*mode)


def _flag(owner: Any, name: str) -> Setting:
    def write(value: object) -> None:
        setattr(owner, name, value)

    return Setting(lambda: getattr(owner, name), write)


SETTINGS = (
    Setting(random.getstate, random.setstate),
    Setting(_numpy_state, _set_numpy_state),
    Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    Setting(torch.get_default_device, torch.set_default_device),
    Setting(torch.get_num_threads, torch.set_num_threads),
    Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    Setting(_anomaly_mode, _set_anomaly_mode),
    _flag(torch.backends.mkldnn, "enabled"),
    _flag(torch.backends.cudnn, "enabled"),
    _flag(torch.backends.cudnn, "benchmark"),
    _flag(torch.backends.cudnn, "deterministic"),
    _flag(torch.backends.cudnn, "allow_tf32"),
    _flag(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    _flag(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    *(
        Setting(getattr(torch.backends.cuda, f"{kind}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kind}_sdp"))
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
    Setting(np.geterr, _set_errors),
    Setting(lambda: dict(os.environ), _set_environment),
    Setting(sys.getrecursionlimit, sys.setrecursionlimit),
)
"""What is put back after a step; settings that only a context changes are not in it."""
