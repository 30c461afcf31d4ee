"""Errors for a handle that is used as a model or as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

_NO_MODEL = (
    "{name} is not the model, which is changed in place: keep both, as in `comm = "
    "sdp4bit.quantize_communication(model)`, and go on with `model`"
)


class Misused:
    """Names the way out where Python would fail inside of the handle, or without a reason."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError: the model is called, not the handle."""
        raise TypeError(_NO_MODEL.format(name=type(self).__name__))

    if not TYPE_CHECKING:  # which would then accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, for a model's attribute with the way out."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(nn.Module, name):
                text += f": {_NO_MODEL.format(name=type(self).__name__)}"
            raise AttributeError(text)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError for `pickle`, `torch.save` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} belongs to this process and cannot be copied or pickled. Save "
            'comm.state_dict(), or pass the handle itself to dcp.save({"comm": comm}) of '
            "torch.distributed.checkpoint"
        )
