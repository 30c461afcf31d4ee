"""Handles of engines that can change their settings between two steps, for `config="auto"`."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.host import all_reduce_on_host
from sdp4bit.config import UNQUANTIZED, Auto, SDP4BitConfig
from sdp4bit.engines.auto import Search
from sdp4bit.engines.handle import CommHandle, StateDict


class ChoosingHandle(CommHandle):
    """A handle that can use other settings between two steps."""

    def _search_among(self, auto: Auto, *, host: ProcessGroup | None) -> Search:
        """Create the search, begin with its first candidate, and return it; collective over the job."""
        assert self._layouts is not None
        every: list[list[tuple[int, ...]]] = [[]] * dist.get_world_size()
        with comm_error_context("agreement on the ranks that choose together"):
            dist.all_gather_object(every, self._copied_over())
        ranks = self._layouts.connected({ranks for of_rank in every for ranks in of_rank})
        group, handle = host or dist.group.WORLD, cast(ChoosingHandle, weakref.proxy(self))
        assert group is not None

        def maximum(values: Sequence[float]) -> Sequence[float]:
            agreed = torch.tensor(values, dtype=torch.float64)
            what = 'agreement of config="auto"'
            all_reduce_on_host(agreed, group, ranks=ranks, op=dist.ReduceOp.MAX, what=what)
            return agreed.tolist()

        named = auto.named()
        useful = maximum([each is None or self._quantizes(each) for each in named.values()])
        names = [name for name, is_useful in zip(named, useful, strict=True) if is_useful]
        search = Search(
            auto,
            [auto.choice] if auto.choice is not None else names or [*named][:1],
            use=partial(type(self)._use, handle),
            refusal=partial(type(self)._refusal, handle),
            maximum=maximum,
            device=self._state.device,
            ranks=ranks,
        )
        self._search = search
        self._set_config(search.settings)
        return search

    def _use(self, config: SDP4BitConfig | None) -> None:
        """Communicate by these settings from now on, None: as without sdp4bit; sends nothing."""
        self._installed.close()
        self._set_config(config)
        self._equip()
        if self._is_quantized:
            self._install_groups()
        if self._alerts is not None:
            self._alerts.watch(self._state.groups, telemetry=self._state.telemetry)
        self.resync()

    def _set_config(self, config: SDP4BitConfig | None) -> None:
        self.config = UNQUANTIZED if config is None else config
        self._set_quantized(config is not None)

    @abstractmethod
    def _quantizes(self, config: SDP4BitConfig) -> bool:
        """Return whether these settings would quantize anything."""

    def _copied_over(self) -> list[tuple[int, ...]]:
        """Return further ranks that hold copies of parameters, which must round them identically."""
        return []

    @abstractmethod
    def _equip(self) -> None:
        """Give the groups the collectives of the settings."""

    def _refusal(self) -> str:
        """Return why other settings cannot be used at the end of this step, "" if they can."""
        return ""

    def _saved_search(self) -> StateDict:
        return {} if self._search is None else {"auto": self._search.state()}

    def _load_search(self, saved: StateDict) -> None:
        """Continue with the saved choice; before the rest, because a switch makes full weights due."""
        if self._search is not None:
            self._search.load(saved.get("auto"))
