"""Functions that run without autograd, at no cost where a caller has switched it off."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without gradients."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def outside_autograd(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without gradients and outside of inference mode.

    The tensors that it makes may be changed in training.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run
