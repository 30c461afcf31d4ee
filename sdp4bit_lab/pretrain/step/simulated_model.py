"""Train a model in one process as many data-parallel ranks would, with quantized communication.

The process holds the fp32 main weights, and the gathered weights that all ranks share. It computes the
forwards and backwards of the ranks in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint import RandomState
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.model.gpt import GPT, Block
from sdp4bit_lab.pretrain.step.parallelize import RankLayout, ShardedModel, dtype_of, resolve_compute_dtype
from sdp4bit_lab.simulated.collectives import simulated_layout
from sdp4bit_lab.simulated.communication import SimulatedCommHandle


class SimulatedRandom:
    """Random generator states of all simulated ranks; a Stateful."""

    def __init__(self, ranks: int, *, seed: int, device: torch.device) -> None:
        self._generators = RandomState(device)
        self._states = []
        for rank in range(ranks):
            torch.manual_seed(seed + rank)
            self._states.append(self._generators.state_dict())

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Draw the rank's next random numbers inside the block."""
        self._generators.load_state_dict(self._states[rank])
        yield
        self._states[rank] = self._generators.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.stack([state[name] for state in self._states]) for name in self._states[0]}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self._states = [
            {name: stacked[rank].clone() for name, stacked in state_dict.items()}
            for rank in range(len(self._states))
        ]


@dataclass(frozen=True, kw_only=True)
class SimulatedModel(ShardedModel):
    """Model of simulated ranks; `chunks` holds the full main weights."""

    compute: GPT
    """Gathered weights of all ranks, in param_dtype."""
    communication: SimulatedCommHandle
    random: SimulatedRandom

    @property
    def data_parallel_size(self) -> int:
        return self.communication.layout.size

    def train(self, mode: bool = True) -> None:
        self.compute.train(mode)

    def reshard(self) -> None:
        self.communication.reshard()

    def describe_layout(self) -> str:
        return f"{self.data_parallel_size} simulated ranks ({self._nodes})"

    def describe_ranks(self) -> str:
        device = self.layout.ranks.device.type
        return f"{self.data_parallel_size} simulated ranks ({self._nodes}, {device})"

    @property
    def _nodes(self) -> str:
        return self.communication.layout.describe()

    @property
    def per_rank(self) -> dict[str, Stateful]:
        return {"simulated_random": self.random}


def parameter_groups(model: GPT) -> Iterator[tuple[str, list[str]]]:
    """Yield name and parameter names of every FSDP2 group, in quantize_communication's order."""
    names = [name for name, _ in model.named_parameters()]
    blocks = [f"blocks.{layer}" for layer in model.blocks]
    yield "(root)", [name for name in names if not name.startswith("blocks.")]
    for block in blocks:
        yield block, [name for name in names if name.startswith(f"{block}.")]


def build_simulated_model(config: PretrainConfig, *, layout: RankLayout) -> SimulatedModel:
    """Return the model with the initial weights of a real run on any number of ranks."""
    parallel, training, device = config.parallel, config.training, layout.ranks.device
    ranks, ranks_per_node = parallel.simulated_ranks, parallel.ranks_per_node
    if ranks is None or ranks_per_node is None:
        raise SettingError("simulated ranks need --simulated-ranks and --ranks-per-node")
    param_dtype = dtype_of(training.param_dtype)
    quantization = config.quantization
    try:
        nodes = simulated_layout(
            ranks, ranks_per_node=ranks_per_node, nodes_per_block=parallel.nodes_per_block
        )
    except ValueError as error:
        raise SettingError(str(error)) from error

    def build() -> GPT:
        with torch.device("meta"):
            model = GPT(
                config.model_shape,
                compute_dtype=resolve_compute_dtype(
                    training.compute_dtype, param_dtype=param_dtype, device=device
                ),
                recompute=parallel.recompute_granularity,
            )
        return model.to_empty(device=device)

    main = build()
    main.reset_parameters(seed=config.seed)
    # Only quantization or another dtype can make gathered weights differ from the main weights.
    is_shared = param_dtype == torch.float32 and quantization.weights is None
    compute = main if is_shared else build().to(param_dtype)
    if training.compile:
        for block in compute.blocks.values():
            assert isinstance(block, Block)
            block.compile()
    return SimulatedModel(
        chunks=[main],
        stages=[0],
        layout=layout,
        compute=compute,
        communication=SimulatedCommHandle(
            main,
            compute,
            groups=parameter_groups(main),
            layout=nodes,
            config=quantization,
            reshard=training.reshard_after_forward,
        ),
        random=SimulatedRandom(ranks, seed=config.seed, device=device),
    )
