"""Writes into the tensors of a model's state dict, which torch.distributed.checkpoint loads in place.

They share memory with the parameters but not their version counters.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from sdp4bit.integrations.fsdp_groups import FSDPGroup, ParamSegment, Version, tensor_version


class StateDictAliases:
    """The tensors that state_dict() has handed out, as long as somebody may write into them."""

    def __init__(self) -> None:
        self._handed_out: list[tuple[ParamSegment, weakref.ref[Any], Version]] = []
        self._kept: list[Any] = []
        """Alive until the next look: a state dict may be gone when its tensors' versions are asked for."""

    def watch(self, group: FSDPGroup) -> list[RemovableHandle]:
        """State dicts that hold a parameter of the group are noted, until the hooks are removed."""
        return [self._watch(segment) for segment in group.segments]

    def _watch(self, segment: ParamSegment) -> RemovableHandle:
        def after_state_dict(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
            value = state_dict.get(prefix + segment.own_name)
            if value is not None and hasattr(value, "_local_tensor"):
                self._handed_out.append((segment, weakref.ref(value), tensor_version(value)))
                self._kept.append(value)

        hook: RemovableHandle = segment.owner.register_state_dict_post_hook(after_state_dict)
        return hook

    def written(self) -> dict[str, tuple[bool, bool]]:
        """Return, by parameter, whether it was written to since the last call: as a DTensor, as a shard."""
        result: dict[str, tuple[bool, bool]] = {}
        alive = []
        for segment, reference, before in self._handed_out:
            value = reference()
            if value is None:
                continue
            now = tensor_version(value)
            if now != before:
                operated, edited = result.get(segment.name, (False, False))
                result[segment.name] = operated or now[0] != before[0], edited or now[1:] != before[1:]
            alive.append((segment, reference, now))
        self._handed_out = alive
        self._kept.clear()
        return result
