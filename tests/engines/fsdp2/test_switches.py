"""Every switch of FSDP2 trains bit for bit as with plain FSDP2, with modules that run once, twice or never.

Layer: 4 real processes over gloo, 2 nodes x 2 ranks. The quantizers are the identity, and plain FSDP2 adds
gradients in the order of the exchange. The number of ranks is a power of two. Dividing a sum by it is exact,
so a mean may be taken before or after a sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sdp4bit import SDP4BitConfig
from tests.ranks import on_ranks
from tests.toy import IDENTITY, POLICY, VOCABULARY, Result, Run, assert_equal, data_mesh

WIDTH = 16


class Part(nn.Module):
    """Two layers in one parameter group; the second one is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gated: bool) -> Tensor:
        y = torch.tanh(self.layer(x))
        return x + y * torch.sigmoid(self.gate(x)) if gated else x + y


class Paths(nn.Module):
    """One part runs once, one twice, and one only in every second step; a scale is on one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.once, self.twice, self.rare = Part(), Part(), Part()
        self.scale = nn.Parameter(torch.ones(1))
        self.number = 0
        self.gates_by_rank = False
        """Whether ranks use different parameters. FSDP2 then needs zeros for unused ones."""

    def forward(self, tokens: Tensor) -> Tensor:
        is_odd = self.number % 2 == 1
        gated = (dist.get_rank() + self.number) % 2 == 1 if self.gates_by_rank else is_odd
        x = self.twice(self.once(self.embed(tokens), gated), gated)
        if is_odd:
            x = self.rare(x, gated)
        return self.head(self.twice(x, False)) * self.scale


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# -- switches ---------------------------------------------------------------------------------------------


def for_all(setter: str, *values: Any) -> Callable[[Any], None]:
    """Return a function that calls a setter of every FSDP module."""

    def switch(model: nn.Module) -> None:
        for module in fsdp_modules(model):
            getattr(module, setter)(*values)

    return switch


def use_unused_parameters(model: Any) -> None:
    model.set_reduce_scatter_unused_params(True)
    model.gates_by_rank = True


def prefetch(model: Any) -> None:
    model.set_modules_to_forward_prefetch([model.once, model.twice])
    model.once.set_modules_to_forward_prefetch([model.twice])
    model.twice.set_modules_to_backward_prefetch([model.once, model.embed])


def divide(factor: float) -> Callable[[Any], None]:
    """Return a function that sets a divisor. Gloo cannot multiply before it sums, so sums are forced."""

    def switch(model: nn.Module) -> None:
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)

    return switch


def divide_by_shards(model: Any) -> None:
    """FSDP2 then takes the mean over shards, and the sum over replicas."""
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(float(model.once.layer.weight.device_mesh.size(-1)))


@dataclass(frozen=True, kw_only=True)
class Switch:
    """Options of fully_shard, and setters to call before or after attaching."""

    before: Callable[[Any], object] = lambda _: None
    after: Callable[[Any], object] = lambda _: None
    options: tuple[tuple[str, Any], ...] = ()
    needs: str = ""
    """A setter that older versions of torch lack."""


SWITCHES = {
    "usual": Switch(),
    "unused parameters": Switch(before=use_unused_parameters, needs="set_reduce_scatter_unused_params"),
    "sums": Switch(before=for_all("set_force_sum_reduction_for_comms", True)),
    "means": Switch(before=for_all("set_force_sum_reduction_for_comms", False)),
    "means after attaching": Switch(after=for_all("set_force_sum_reduction_for_comms", False)),
    "kept after forward": Switch(options=(("reshard_after_forward", False),)),
    "kept after forward, set later": Switch(after=lambda m: m.set_reshard_after_forward(False)),
    "resharded after forward": Switch(before=lambda m: m.set_reshard_after_forward(True)),
    "resharded to pairs": Switch(options=(("reshard_after_forward", 2),)),
    "prefetched": Switch(after=prefetch),
    "divided by 3": Switch(before=divide(3.0)),
    "divided by 3 after attaching": Switch(after=divide(3.0)),
    "divided by shards": Switch(before=divide_by_shards),
    "hooked": Switch(before=for_all("set_all_reduce_hook", lambda gradient: gradient.mul_(2))),
    "hooked after attaching": Switch(after=for_all("set_all_reduce_hook", lambda gradient: gradient.mul_(2))),
    "not gathered for backward": Switch(before=lambda m: m.embed.set_unshard_in_backward(False)),
    "own reduce-scatter group": Switch(
        before=lambda m: m.set_separate_reduce_scatter_group(True), needs="set_separate_reduce_scatter_group"
    ),
    "three input buffers": Switch(
        before=for_all("set_reduce_scatter_max_input_buffers", 3),
        needs="set_reduce_scatter_max_input_buffers",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The switches of one forward and backward."""

    syncs: bool = True
    sums_replicas: bool = True
    is_last: bool = True
    reshards: bool = True
    is_whole: bool = False
    """Whether all parts run, as otherwise only in every second step."""


STEPS = 3
LOOPS = {
    "steps": [Pass()],
    "accumulated before": [Pass(syncs=False, is_whole=True), Pass()],
    "accumulated after": [Pass(is_last=False, is_whole=True), Pass()],
    "accumulated and kept": [Pass(syncs=False, is_last=False, reshards=False, is_whole=True), Pass()],
    "summed over replicas at the end": [Pass(sums_replicas=False), Pass(sums_replicas=False), Pass()],
}
"""The passes of a step."""

POLICIES = {
    "mixed": POLICY,
    "fp32": MixedPrecisionPolicy(),
    "bf16": replace(POLICY, reduce_dtype=torch.bfloat16),
}
MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "4 shards": data_mesh,
    "2 x 2": lambda: DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("r", "s")),
}
"""The shards of each of two replicas are on different nodes."""


class SwitchedRun(Run):
    """Train with a switch."""

    def __init__(
        self, config: SDP4BitConfig | None, switch: Switch, *, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> None:
        torch.manual_seed(0)
        model = Paths()
        options = {"mesh": mesh, "mp_policy": policy, **dict(switch.options)}
        for module in (model.embed, model.once, model.twice, model.rare, model):
            fully_shard(module, **options)
        switch.before(model)
        super().__init__(model, config, ordered=mesh.ndim == 1)
        switch.after(model)

    def train_in(self, passes: Sequence[Pass]) -> Result:
        """Return the results of a few steps."""
        for step in range(STEPS):
            for each in passes:
                self.model.number = 1 if each.is_whole else step
                self.model.set_requires_gradient_sync(each.syncs)
                self.model.set_requires_all_reduce(each.sums_replicas and each.syncs)
                self.model.set_is_last_backward(each.is_last)
                self.model.set_reshard_after_backward(each.reshards)
                self.backward()
            self.step()
        result = self.finish()
        if self.comm is not None:
            self.comm.remove()
        return result


Case = tuple[str, str, str, str]
"""A switch, a loop, a policy and a mesh."""


def is_possible(case: Case) -> bool:
    name, loop, policy, mesh = case
    if SWITCHES[name].needs and not hasattr(FSDPModule, SWITCHES[name].needs):
        return False
    if name == "unused parameters" and policy == "mixed" and not all(each.syncs for each in LOOPS[loop]):
        return False  # FSDP2 does not reduce bf16 zeros beside gradients that it has accumulated in fp32
    if name == "divided by shards" and torch.__version__ < "2.10":
        return False  # plain FSDP2 multiplies before the sum there, which gloo cannot do
    if mesh == "2 x 2":
        return name != "resharded to pairs"  # all shards are one pair
    return "replicas" not in loop


def check(cases: Sequence[Case]) -> None:
    """All cases train as with plain FSDP2; the error lists those that do not."""
    wrong: list[str] = []
    meshes = {name: make() for name, make in MESHES.items()}
    with warnings.catch_warnings():
        # An int reshard_after_forward leaves weights to FSDP2.
        warnings.filterwarnings("ignore", "sdp4bit: ")
        for case in cases:
            name, loop, policy, mesh = case
            results = [
                SwitchedRun(config, SWITCHES[name], mesh=meshes[mesh], policy=POLICIES[policy]).train_in(
                    LOOPS[loop]
                )
                for config in (None, IDENTITY)
            ]
            try:
                assert_equal(*reversed(results))
            except AssertionError as error:
                wrong.append(f"{case}: {str(error) or 'losses or weights differ'}")
    assert not wrong, "\n".join(wrong)


CASES: list[Case] = [case for case in product(SWITCHES, LOOPS, POLICIES, MESHES) if is_possible(case)]
QUICK: list[Case] = [
    ("unused parameters", "steps", "mixed", "4 shards"),
    ("unused parameters", "accumulated before", "fp32", "4 shards"),
    ("unused parameters", "summed over replicas at the end", "bf16", "2 x 2"),
    ("means after attaching", "accumulated after", "mixed", "4 shards"),
    ("hooked", "steps", "fp32", "4 shards"),
    ("divided by 3 after attaching", "steps", "bf16", "4 shards"),
    ("kept after forward", "accumulated and kept", "mixed", "2 x 2"),
    ("prefetched", "accumulated and kept", "fp32", "4 shards"),
    ("own reduce-scatter group", "accumulated after", "mixed", "2 x 2"),
]


def test_quick_cases_are_among_all() -> None:
    """A case of another name would not be tried, as the cases are chosen from all that torch can run."""
    assert {*QUICK} <= {*product(SWITCHES, LOOPS, POLICIES, MESHES)}
    assert {*SWITCHES} == {name for name, *_ in CASES} | {n for n, s in SWITCHES.items() if s.needs}


@pytest.mark.parametrize(
    "part", ["quick", *(pytest.param(name, marks=pytest.mark.slow) for name in SWITCHES)]
)
@on_ranks(4, timeout=280)
def test_every_switch_trains_as_with_plain_fsdp2(part: str) -> None:
    check([case for case in CASES if (case in QUICK if part == "quick" else case[0] == part)])
