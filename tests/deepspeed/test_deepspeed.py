"""DeepSpeed's ZeRO-1 and ZeRO-2: runs without and with quantizers, resume, bytes, refusals.

Layer: 2 gloo processes that represent a node each, or 4 on two nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp4bit import GradientConfig, ReplicaMismatchError, SDP4BitConfig, quantize_communication
from sdp4bit.collectives import weight_replica
from sdp4bit.collectives.weight_replica import WeightReplica
from tests.ecosystem.on_cpu import LOSSLESS, count_sent_bytes
from tests.ranks import on_ranks, run_ranks
from tests.rounding_keys import check_unique, drawn_keys

if find_spec("deepspeed") is None:  # not imported here, because only the ranks need it
    pytest.skip("DeepSpeed is not installed: make test-deepspeed", allow_module_level=True)
os.environ["DS_ACCELERATOR"] = "cpu"
PRELOAD = ["deepspeed"]
STEPS, SAVED, MICRO_BATCHES = 8, 5, 2
OFF = SDP4BitConfig(weights=None, gradients=None)
QUANTIZED = SDP4BitConfig(gradients=GradientConfig(min_numel=0))
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 1, sums": {"zero_optimization": {"stage": 1}, "gradient_allreduce_op": "sum"},
    "stage 2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "stage 2, fp32": {
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    },
    "stage 1, fp16 summed in fp32": {
        "zero_optimization": {"stage": 1},
        "communication_data_type": "fp32",
        "bf16": {"enabled": False},
        "fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1},  # the first steps overflow
    },
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(61), nn.Linear(61, 131), nn.GELU(), nn.Linear(131, 61))
        self.unused = nn.Parameter(torch.ones(33, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


def engine_of(**options: Any) -> Any:
    """Return DeepSpeed's engine for a model with the same random weights in every call."""
    import deepspeed

    # DeepSpeed would compile an all-reduce over shared memory, and offers fp16 on GPUs only.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), RANK=str(dist.get_rank()))
    torch.manual_seed(0)
    model = Model()
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == wide]} for wide in (True, False)]
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.2,
        "bf16": {"enabled": True},
        **options,
    }
    config["zero_optimization"]["reduce_bucket_size"] = 9000  # so that plain DeepSpeed has several buckets
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=2e-3), config=config)[0]


def train(name: str, config: Any, folder: Path, start: Path | None = None) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    engine, world = engine_of(**OPTIONS[name]), dist.get_world_size()
    comm = config and quantize_communication(engine, topology=world // 2, config=config)
    if start is not None:
        engine.load_checkpoint(str(start))
    data = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randn(MICRO_BATCHES, 8, 61, generator=data).to(engine.module.unused.dtype)
    batches = batches.repeat(STEPS, 1, 1)
    found: dict[str, Any] = {"losses": [], "norms": []}
    with count_sent_bytes() as sent, drawn_keys(expected=config not in (None, OFF)) as keys:
        for batch in batches[engine.global_steps * MICRO_BATCHES :]:
            loss = (engine(batch) - batch.flip(1)).float().square().mean()
            engine.backward(loss)
            ends_step = engine.is_gradient_accumulation_boundary()
            engine.step()
            found["losses"].append(loss.item())
            if ends_step:
                found["norms"].append(float(engine.get_global_grad_norm()))
            if ends_step and engine.global_steps == SAVED and start is None:
                engine.save_checkpoint(str(folder))
    found["sent"], found["skipped"] = sent, engine.skipped_steps
    check_unique(keys, at_least=STEPS - SAVED if config is QUANTIZED else 0)
    found["weights"] = [p.detach().float().flatten().tolist() for p in engine.module.parameters()]
    found["main"] = [main.tolist() for main in engine.optimizer.single_partition_of_fp32_groups]
    if comm:
        found["stats"] = {**comm.stats(), **comm.measure()}
        assert comm.audit()
        comm.remove()
        assert not {"step", "average_tensor", "state_dict"} & vars(engine.optimizer).keys()
    found["removed"] = [p.detach().float().flatten().tolist() for p in engine.module.parameters()]
    return found


@contextlib.contextmanager
def sums_node_by_node() -> Iterator[None]:
    """Let all-reduces over two nodes add in fp32 in the order of the library, which gloo does not."""
    stock = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        if op != dist.ReduceOp.SUM or dist.get_world_size(group) != 4:
            return stock(tensor, op=op, group=group, **options)
        parts = [torch.empty_like(tensor) for _ in range(4)]
        dist.all_gather(parts, tensor, group=group)
        a, b, c, d = (part.float() for part in parts)
        return tensor.copy_((a + b) + (c + d))

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


def train_all(name: str, folder: Path) -> dict[str, Any]:
    found = {"plain": train(name, None, folder / "plain"), "off": train(name, OFF, folder / "off")}
    with sums_node_by_node():
        found["ordered"] = train(name, None, folder / "ordered")
        found["lossless"] = train(name, LOSSLESS, folder / "lossless")
        found["continued"] = train(name, LOSSLESS, folder / "continued", folder / "lossless")
    found["quantized"] = train(name, QUANTIZED, folder / "quantized")
    found["resumed"] = train(name, QUANTIZED, folder / "resumed", folder / "quantized")
    found["from plain"] = train(name, QUANTIZED, folder / "from plain", folder / "plain")
    return found


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in OPTIONS), ("stage 1", 4), ("stage 2", 4)]
)
def test_without_quantizers_a_run_equals_plain_and_with_them_it_is_close(
    name: str, ranks: int, tmp_path: Path
) -> None:
    for found in run_ranks(train_all, ranks, name, tmp_path):
        plain, ordered, quantized = found["plain"], found["ordered"], found["quantized"]
        for what in ("losses", "norms", "weights", "main", "removed"):
            assert ranks == 4 or ordered[what] == plain[what]
            assert found["off"][what] == plain[what], what
            assert found["lossless"][what] == ordered[what], what
            last = slice(-len(found["resumed"][what]), None)
            assert found["continued"][what] == ordered[what][last], what
            assert found["resumed"][what] == quantized[what][last], what
        assert quantized["losses"] != plain["losses"]
        assert quantized["losses"] == pytest.approx(plain["losses"], rel=0.01)
        # The norm is clipped before the optimizer, which hides the scale of gradients, too.
        assert quantized["norms"] == pytest.approx(plain["norms"], rel=0.1)
        assert found["from plain"]["losses"] == pytest.approx(plain["losses"][-6:], rel=0.01)
        assert plain["losses"][-1] < 0.95 * plain["losses"][1]
        # The first parameter has no gradient, and must not get the noise of a quantized zero.
        assert quantized["weights"][0] == pytest.approx(plain["weights"][0], rel=0.01)
        assert (plain["skipped"] > 0) == ("fp16" in name)
        assert quantized["stats"]["steps"] == STEPS - plain["skipped"]
        # Plain DeepSpeed gathers rows of 16 bits and sends each gradient twice, to and from its sum.
        stats, numel = quantized["stats"], sum(map(len, quantized["main"]))
        gradient_bytes = 2 * (MICRO_BATCHES if "stage 2" in name else 1) * (4 if "fp32" in name else 2)
        if ranks == 2:
            assert stats["last_step"]["inter_bytes"] * stats["compression_ratio"] == pytest.approx(
                numel * (2 + gradient_bytes)
            )
            assert sum(quantized["sent"].values()) == stats["total"]["inter_bytes"]
            # Full precision counts the parameters with a gradient, without padding.
            off = found["off"]["stats"]
            assert off["last_step"]["inter_bytes"] == pytest.approx(numel * (2 + gradient_bytes), rel=0.02)
            assert off["compression_ratio"] == off["total_compression_ratio"] == 1
        # The distance of fp32 weights from a replica in 16 bits whose differences have 4 bits.
        assert 0 < stats["weight_drift"] < 0.01 and stats["pending"] == 0


@on_ranks(2)
def test_refusals() -> None:
    for stage, kind in ((1, "BF16_Optimizer"), (3, "DeepSpeedZeroOptimizer_Stage3")):
        options = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "fp32"}}
        with pytest.raises(ValueError, match=rf"optimizer is {kind} \(ZeRO stage {stage}\)"):
            quantize_communication(engine_of(**options), topology=1)
    engine = engine_of(zero_optimization={"stage": 2})
    for target, option in (
        (engine, "pipeline_parallelism"),
        (engine.optimizer, "cpu_offload"),
        (engine.optimizer, "has_moe_layers"),
        (engine.optimizer, "overlap_comm"),
    ):
        with (
            mock.patch.object(target, option, dist.get_rank() == 1),
            pytest.raises(ValueError, match=r"does not support DeepSpeed with .*\[rank 1\]"),
        ):
            quantize_communication(engine, topology=1)
    comm = quantize_communication(engine, topology=1)
    with pytest.raises(ValueError, match="an attached handle"):
        quantize_communication(engine, topology=1)
    for parameter in engine.module.parameters():
        parameter.data += dist.get_rank()
    with pytest.raises(ReplicaMismatchError):
        comm.audit()
    for number in range(2):
        comm.resync()
        assert comm.stats()["full_refreshes"] == (number + 1) * len(comm.groups)
    assert comm.audit()


Target = Callable[[Any], tuple[object, str]]
FAULTS: dict[str, tuple[Target, int, bool]] = {
    "before the step": (lambda zero: (zero, "scaled_global_norm"), 1, False),
    "between two groups": (lambda zero: (zero, "_optimizer_step"), 2, False),
    "before sending": (lambda _: (WeightReplica, "_start"), 1, False),
    "while sending": (lambda _: (WeightReplica, "_start"), 2, False),
    "applying the first group": (lambda _: (weight_replica, "_finish"), 1, True),
    "applying the last group": (lambda _: (weight_replica, "_finish"), 2, True),
    "after the step": (lambda zero: (zero, "_update_model_bit16_weights"), 1, True),
}
"""Points of `engine.step()`: the function that fails there, in which of its calls, and whether one rank may
see it alone. Before that, the others wait for the messages of this rank until they time out."""


@contextlib.contextmanager
def failing(
    target: object, name: str, call: int, *, error: type[BaseException], here: bool
) -> Iterator[None]:
    """Let this call of a function fail on this rank if `here`."""
    real, calls = getattr(target, name), itertools.count(1)

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls) == call and here:
            raise error("on purpose")
        return real(*args, **options)

    with mock.patch.object(target, name, fail):
        yield
    assert next(calls) > call, f"{name} was not called"


def hold_the_same(values: Sequence[torch.Tensor]) -> bool:
    """Return whether all ranks hold the same bits."""
    mine = torch.cat([each.detach().flatten().view(torch.uint8) for each in values])
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return all(torch.equal(mine, other) for other in everybody)


def step_once(engine: Any, number: int) -> None:
    data = torch.Generator().manual_seed(2 * number + dist.get_rank())
    batch = torch.randn(8, 61, generator=data).to(engine.module.unused.dtype)
    engine.backward((engine(batch) - batch.flip(1)).float().square().mean())
    engine.step()


@on_ranks(2)
def test_a_parameter_without_a_gradient_gets_no_noise_of_the_others() -> None:
    mains = []
    for config in (None, QUANTIZED):
        # Gradients in fp32 have a buffer, to which all that has been reduced is added.
        engine = engine_of(**OPTIONS["stage 2, fp32"], gradient_accumulation_steps=1)
        comm = config and quantize_communication(engine, topology=1, config=config)
        for number in range(2):
            step_once(engine, number)
        zero = engine.optimizer
        mains.append([main.clone() for main in zero.single_partition_of_fp32_groups])
    unused, held = engine.module.unused, 0
    for group, params, plain, ours in zip(comm.groups, zero.bit16_groups, *mains, strict=True):
        assert not torch.equal(plain, ours)
        if any(param is unused for param in params):
            place, first = group.view.places[zero.get_param_id(unused)], group.view.own.start
            start, end = (min(max(at - first, 0), len(ours)) for at in place)  # in this rank's row
            assert torch.equal(plain[start:end], ours[start:end])
            held = end - start
    numel = torch.tensor(held)
    dist.all_reduce(numel)
    assert numel == unused.numel()


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_an_exception_in_a_step_leaves_equal_replicas(stage: int) -> None:
    number, rank = itertools.count(), dist.get_rank()
    for config in (LOSSLESS, QUANTIZED):
        engine = engine_of(zero_optimization={"stage": stage}, gradient_accumulation_steps=1)
        comm, zero = quantize_communication(engine, topology=1, config=config), engine.optimizer
        weights = zero.bit16_groups_flat
        for (point, (target, call, alone)), error, ranks in itertools.product(
            FAULTS.items(), (torch.OutOfMemoryError, KeyboardInterrupt), ((0, 1), (1,))
        ):
            if ranks == (1,) and not alone:
                continue
            step_once(engine, next(number))
            before, steps = [each.clone() for each in weights], comm.stats()["steps"]
            raised = pytest.raises(error) if rank in ranks else contextlib.nullcontext()
            with failing(*target(zero), call, error=error, here=rank in ranks), raised:
                step_once(engine, next(number))
            if not alone:  # groups that were not sent are unchanged
                unsent = slice(int(point == "while sending"), None)
                assert all(map(torch.equal, before[unsent], weights[unsent])), point
                assert hold_the_same(weights), point
            assert comm.stats()["steps"] == steps + alone, point
            step_once(engine, next(number))
            assert hold_the_same(weights) and comm.audit(), (point, error, ranks)
            for main, flat in zip(zero.single_partition_of_fp32_groups, weights, strict=True):
                own = flat.view(2, -1)[rank]
                assert config is QUANTIZED or torch.equal(own, main.to(flat.dtype)), (point, error, ranks)
                assert (own - main).norm() < 0.01 * main.norm(), (point, error, ranks)
        comm.remove()
