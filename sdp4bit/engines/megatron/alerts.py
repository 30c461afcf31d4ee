"""Alerts and the precision fallback on Megatron-Core: who decides together, and what is saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.exchange import all_gather_dense
from sdp4bit.config import AlertConfig
from sdp4bit.engines.alerts import Alerts, DecisionRound, Positions
from sdp4bit.engines.fallback import STATE_NUMEL
from sdp4bit.engines.measures import SampledMeasures
from sdp4bit.engines.megatron.buckets import (
    MegatronBucket,
    embedding_group,
    pipeline_group,
    tensor_parallel_group,
)
from sdp4bit.engines.megatron.communication import BucketCommunication
from sdp4bit.engines.megatron.objects import Chunk

_TIED = "tied embedding"
"""What the saved state calls the bucket of a tied embedding, on all stages that hold it."""


def check_watchable(chunks: Sequence[Chunk], buckets: Sequence[MegatronBucket]) -> None:
    """Raise ValueError unless all ranks can decide on these buckets at the same moment of a step."""
    if len({id(bucket.optimizer) for bucket in buckets if not bucket.is_expert}) > 1:
        raise ValueError(
            "alerts look at a step before any of its weights is sent, and these model chunks have optimizers "
            "that step and send one after the other: set overlap_param_gather_with_optimizer_step=False, or "
            "alerts=None"
        )
    if any(bucket.has_tied_embedding for bucket in buckets) and embedding_group(chunks) is None:
        raise ValueError(
            "a model chunk has a tied embedding but does not say which pipeline stages hold copies of it "
            "(embd_group, as in Megatron-Core's LanguageModule): the copies could not change their bits "
            "together; set alerts=None"
        )


class BucketAlerts(Alerts):
    """Alerts of one rank's buckets, and what is saved of the positions of all pipeline stages.

    Three kinds of ranks decide together: first those that a bucket is divided over; then the tensor-parallel
    ranks, whose buckets hold parts of the same layers; then the pipeline stages that hold copies of a tied
    embedding, which must be rounded alike. Stages otherwise decide for themselves. Last, the stages exchange
    where they stand.

    No ranks wait for each other in a circle: a rank is in at most one group of each of these four kinds, and
    takes the kinds in this order. A collective that is waited for waits in turn only for ranks that are in an
    earlier kind; those in the first wait for none. All ranks get here for the same steps, as Megatron skips a
    step on all of them or on none.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        comms: Sequence[BucketCommunication],
        *,
        sampled: SampledMeasures,
        config: AlertConfig,
        takes_steps: bool,
    ) -> None:
        """All buckets are as configured; collective over the job.

        Args:
            takes_steps: this stage has weights to train, so that it gets to step boundarys.
        """
        # The weights of experts move when a step has been decided on.
        quantized = [comm for comm in comms if comm.replica is not None or comm.reduction is not None]
        watched = [comm for comm in quantized if not comm.group.is_expert]
        tied = _tied_on_all_stages(chunks, watched)
        self._stages = pipeline_group(chunks)
        stage = 0 if self._stages is None else self._stages.rank()
        super().__init__(
            watched,
            rounds=_rounds(chunks, watched, tied),
            sampled=sampled,
            config=config,
            where="" if self._stages is None else f"pipeline stage {stage}",
        )
        self._falls_back = config.action == "fallback"
        self._keys = {
            comm.group.name: _TIED if at in tied else f"stage{stage}.{comm.group.name}"
            for at, comm in enumerate(watched)
        }
        self._keys_of_stages = [list(self._keys.values())]
        self._share_keys(takes_steps)
        self._device = comms[0].group.device if comms else torch.device("cpu")
        self._positions_of_all: dict[str, list[float]] = {}

    def _share_keys(self, takes_steps: bool) -> None:
        """Every stage knows what the others save; a stage without steps cannot take part."""
        if self._stages is None or not self._falls_back:
            return
        keys: list[list[str] | None] = [None] * self._stages.size()
        with comm_error_context("agreement on alerts", group=self._stages):
            dist.all_gather_object(keys, self._keys_of_stages[0] if takes_steps else None, group=self._stages)
        told = [each for each in keys if each is not None]
        if len(told) < len(keys):
            self._stages = None
        else:
            self._keys_of_stages = told

    def at_step_boundary(self, step: int) -> None:
        """Decide, if the step was measured, alike on all ranks that decide together."""
        super().at_step_boundary(step)
        if self._falls_back and self._sampled.is_due(step):
            self._positions_of_all = self._gather()

    def _gather(self) -> dict[str, list[float]]:
        """Return where the buckets of all stages stand; one all-gather of 17 numbers per bucket."""
        keys = self._keys_of_stages
        own = torch.zeros(max(1, *map(len, keys)), STATE_NUMEL, dtype=torch.float64)
        for at, state in enumerate(self.positions().values()):
            own[at] = state
        if self._stages is None:
            everywhere = own[None]
        else:
            mine = own.to(self._device)
            gathered = mine.new_empty(len(keys) * mine.numel())
            all_gather_dense(gathered, mine.view(-1), self._stages, what="positions of the pipeline stages")
            everywhere = gathered.view(len(keys), *mine.shape)
        states: list[list[list[float]]] = everywhere.tolist()
        return {
            key: state
            for own_keys, own_states in zip(keys, states, strict=True)
            for key, state in zip(own_keys, own_states, strict=False)
        }

    def save(self) -> Positions:
        """Return where the buckets of all stages stood after the last measured step, as of this rank."""
        return dict(self._positions_of_all)

    def load(self, saved: Positions | None) -> None:
        """Continue where every bucket stood; those not saved begin as configured. Call it on all ranks."""
        saved = saved or {}
        self._positions_of_all = {k: list(v) for k, v in saved.items()} if self._falls_back else {}
        states = {name: saved[key] for name, key in self._keys.items() if key in saved}
        super().load({name: torch.tensor(s, dtype=torch.float64) for name, s in states.items()})

    def detach(self) -> None:
        """Watch nothing any more; the log stays."""
        super().detach()
        self._keys, self._positions_of_all = {}, {}


def _rounds(
    chunks: Sequence[Chunk], watched: Sequence[BucketCommunication], tied: Sequence[int]
) -> list[DecisionRound]:
    """Return who decides together on these buckets, in the order that all ranks take."""
    rounds = []
    for ranks in sorted({comm.group.ranks for comm in watched}):
        members = tuple(at for at, comm in enumerate(watched) if comm.group.ranks == ranks)
        first = watched[members[0]]
        rounds.append(
            DecisionRound(
                process_group=first.group.process_group, groups=members, traffic=first.gradient_traffic
            )
        )
    tensor_parallel = tensor_parallel_group(chunks[0])
    if tensor_parallel is not None and watched:
        rounds.append(DecisionRound(process_group=tensor_parallel, groups=tuple(range(len(watched)))))
    embedding = embedding_group(chunks)
    if embedding is not None and tied:
        rounds.append(DecisionRound(process_group=embedding, groups=tuple(tied), as_one=True))
    return rounds


def _tied_on_all_stages(chunks: Sequence[Chunk], watched: Sequence[BucketCommunication]) -> list[int]:
    """Return the places of buckets with a tied embedding; none if some stage does not train its copy.

    Collective over the stages that could hold copies, also if they hold none: untied models have such
    process groups too.
    """
    group: ProcessGroup | None = embedding_group(chunks)
    tied = [at for at, comm in enumerate(watched) if comm.group.has_tied_embedding]
    if group is None:
        return []
    device = next(chunks[0].parameters()).device
    everywhere = torch.tensor([int(bool(tied))], device=device)
    with comm_error_context("agreement on tied embeddings", group=group):
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    return tied if everywhere.item() else []
