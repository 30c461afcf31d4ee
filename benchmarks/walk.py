"""Write docs/walk.md: the functions that one training step runs, in order, with the reason for each.

    python -m benchmarks.walk

traces a job of four gloo ranks. It fails if a function of `STOPS` no longer runs, or if a long one that runs
has no reason there: then edit the table. Links get their lines when the site is built (docs/site/hooks.py).
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
import textwrap
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "sdp4bit"
PAGE = ROOT / "docs" / "walk.md"
RANKS = 4
MOST_LINES = 18
"""Lines that a function may run without a reason in `STOPS`."""

HEAD = """# A step in twenty minutes

<!-- benchmarks/walk.py writes this page. -->

This page follows one training step through the library, function by function. A program traced
rank 0 of four ranks on two nodes, which trains three FSDP2 groups with the default settings. Open
each link and read the function. [Architecture](architecture.md) describes the packages around it.

The [definition](../sdp4bit/quantization/definition.py) of the method, for all ranks in one process,
is worth the first five minutes.

Operators run from **tables**. When a row is first reduced or refreshed, the collective records the
operators of each step with their [ordinary arguments](../sdp4bit/quantization/ops.py), section by
section. A [table](../sdp4bit/quantization/tables.py) keeps the calls of one operator. From the
second time on, one call of the host runs a table. It passes the tensors that have moved, and the
number of the call, from which the random bits follow.
"""


class Part(NamedTuple):
    """A part of a step: a section of the page, with the reason for each of its stops."""

    title: str
    text: str
    stops: dict[str, str]
    """By `module:qualified name`; the page has them in the order in which they run."""


STOPS = {
    "forward": Part(
        "Forward: the weights of a group",
        "The step begins with the forward after an optimizer step. FSDP2 gathers the first group.",
        {
            "engines.fsdp2.hooks:AllGatherHook.__call__": "FSDP2 calls this object instead of its own "
            "all-gather. A group without a replica uses the original.",
            "engines.fsdp2.hooks:AllGatherHook._gather_replica": "This function is the table of contents of "
            "the gather: decide, read the main shard, keep the inputs alive, refresh and fill.",
            "engines.fsdp2.events:FSDPModelState.before_unshard": "FSDP2 does not announce a forward. Its "
            "first gather is recognized here, because ranks must agree before any of them sends.",
            "engines.fsdp2.events:FSDPModelState._agree": "Ranks have seen different events. They combine "
            "them for all groups of the forward in one reduction.",
            "engines.fsdp2.edits:Edits.find_edits": "A checksum finds weights that no optimizer "
            "changed. After a step only frozen parameters are compared, because the others are sent anyway.",
            "engines.fsdp2.edits:Edits.events": "These are the events of this rank: the level of the "
            "refresh that is due, and six flags.",
            "collectives.host:all_reduce_on_host": "The maximum over all ranks travels in log2(ranks) hops "
            "between CPUs. So the host does not wait for the GPU.",
            "collectives.weights:Weights.agree": "The highest level of all ranks counts. After an "
            "optimizer step it is `TRAINED`.",
            "observe.stats:ModelState.end_step": "All ranks know now that the last step is over. Its bytes "
            "and measures are complete.",
            "engines.fsdp2.view:FSDPView.main_shard": "The difference needs the fp32 weights. The row that "
            "FSDP2 passes has been rounded to bf16.",
            "collectives.weights:Weights.refresh": "The level selects the refresh, for every engine. "
            "Transfers start first, and the level falls afterwards, so an exception leaves it.",
            "collectives.weight_replica:WeightReplica.start_quantized_refresh": "The refresh before must "
            "have ended. Then the plan of the row is looked up.",
            "collectives.plan:Plans.of": "The first step has made the plan: sections, messages and bytes. "
            "Later steps only find it.",
            "collectives.weight_replica:WeightReplica._send_differences": "This is the paper's algorithm 2 "
            "in four numbered steps. It pauses at `yield` while the transfer is in flight.",
            "collectives.scratch:Records.of": "The operators of the refresh were recorded in an earlier "
            "step. A record is dropped with a buffer that it uses.",
            "quantization.tables:Table.run": "A table has the calls of one operator for all sections of the "
            "row. Here it subtracts the replica from the main shard and writes codes and scales into the "
            "message.",
            "kernels.cpu.tables:PackedTable.run": "The addresses of this step's tensors go into the packed "
            "parameters, and one call runs the kernels of all sections.",
            "collectives.transport:start_all_gather": "It starts the only transfer of weights "
            "between nodes: one message to the rank with the same local rank on every other node.",
            "engines.fsdp2.edits:Edits.note_refresh": "Checksums of the row are kept for the next forward.",
            "collectives.streams:DeferredWork.wait": "On CPUs the second half of the refresh runs when "
            "FSDP2 waits for its gather. On a GPU, streams overlap it.",
            "engines.fsdp2.hooks:AllGatherHook._fill": "FSDP2 makes its parameters from this output, which "
            "is filled from the replica.",
            "collectives.weight_replica:WeightReplica.gather": "Ranks of a node store each row once. A "
            "gather inside the node collects the bf16 rows.",
        },
    ),
    "backward": Part(
        "Backward: the gradient of a group",
        "Backward begins with the last group. FSDP2 gathers its weights again and reduces its gradients.",
        {
            "engines.fsdp2.hooks:AllGatherHook._gather_replica": "Backward uses the weights of its forward. "
            "Nothing is decided, and nothing is sent between nodes.",
            "collectives.weight_replica:WeightReplica.gather": "The rows of the replica are gathered inside "
            "the node a second time, because FSDP2 has freed the weights.",
            "engines.fsdp2.hooks:ReduceScatterHook._reduce": "FSDP2 has copied the gradients into one row "
            "per rank. The hook passes them on, with FSDP2's own reduction.",
            "engines.fsdp2.edits:Edits.note_reduction": "An optimizer step will change these "
            "parameters. A group without a gradient would not be sent.",
            "collectives.gradients:Gradients.reduce": "The only place that chooses between quantized and "
            "full precision: it compares `start_step` and `min_numel`, for every engine.",
            "collectives.gradients:Gradients.next_reduction": "The number of the reduction is part of the "
            "key of the rounding bits, so it is used once.",
            "collectives.reduce_scatter:QuantizedReduceScatter.__call__": "The row is reduced in chunks, so "
            "that one computes while another is in flight.",
            "collectives.streams:pipelined": "Chunks advance in turn, from pause to pause.",
            "collectives.reduce_scatter:QuantizedReduceScatter._run_chunk": "This is the paper's "
            "algorithm 3 in four numbered steps. Read `_record_chunk` beside it: it has the operator of each "
            "step with its arguments.",
            "quantization.tables:Table.run": "Three tables run in turn. The first transforms 32 values at a "
            "time, which spreads outliers, and quantizes to int8. The second sums the messages of the node "
            "and quantizes to int4, still in the Hadamard domain. The third sums over the nodes, transforms "
            "back and writes this rank's gradient.",
            "collectives.transport:start_all_to_all": "Each rank of the hop receives one message with codes "
            "and scales.",
        },
    ),
    "optimizer": Part(
        "Optimizer step",
        "Nothing is sent. The library only notes that weights have changed.",
        {
            "engines.fsdp2.events:StepObserver.watch_optimizers.after_step": "torch calls this hook after "
            "every step of every optimizer, so a training loop needs no call of ours.",
            "engines.fsdp2.events:StepObserver.note_step": "Optimizers of other models do not count. "
            "Optimizers that step in backward count once.",
            "engines.fsdp2.events:FSDPModelState.after_step": "Each group notes the step, and the step is "
            "pending until the next forward.",
            "engines.fsdp2.edits:Edits.note_step": "A group counts if it has gradients. This is an "
            "event of this rank, on which the next forward agrees.",
            "engines.fsdp2.events:FSDPModelState.reshard": "Parameters that stayed unsharded are freed, so "
            "that the next forward gathers new ones.",
        },
    ),
}


@dataclass
class Trace:
    """The functions of the library that a step ran, by `module:qualified name`."""

    calls: dict[str, list[str]] = field(default_factory=lambda: {part: [] for part in STOPS})
    """In the order of their first calls, by the part of the step."""
    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    part: str = ""
    """The key of `STOPS` that runs."""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        """Record a call or a line; a function for `sys.settrace`."""
        path = frame.f_code.co_filename
        if not path.startswith(f"{LIBRARY}/"):
            return None
        name = _functions(path).get(frame.f_code.co_firstlineno)
        if name is not None:
            self.lines[name].add(frame.f_lineno)
            if name not in self.calls[self.part]:
                self.calls[self.part].append(name)
        return self


@cache
def _functions(path: str) -> dict[int, str]:
    """Return `module:qualified name` of the functions of a file, by their first lines."""
    module = ".".join(Path(path).relative_to(LIBRARY).with_suffix("").parts)

    def below(node: ast.AST, names: list[str]) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from below(child, names)
                continue
            inside = [*names, child.name]
            if isinstance(child, ast.FunctionDef):
                # The first line of a function with decorators is that of the first one.
                first = child.decorator_list[0] if child.decorator_list else child
                yield first.lineno, ".".join(inside)
            yield from below(child, inside)

    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {line: f"{module}:{name}" for line, name in below(tree, [])}


def traced_step() -> Trace:
    """Train three groups on four ranks, as two nodes; return the trace of this rank's fourth step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    comm = sdp4bit.quantize_communication(model, topology=2)
    trace = Trace()
    for is_last in (False, False, False, True):  # tables are packed at their second run
        with _traced(trace) if is_last else nullcontext():
            trace.part = "forward"
            loss = model(torch.randn(8, 64)).float().square().mean()
            trace.part = "backward"
            loss.backward()
            trace.part = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
    comm.remove()
    return trace


@contextmanager
def _traced(trace: Trace) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)


def page(trace: Trace) -> str:
    """Return the page.

    Raises:
        ValueError: `STOPS` and the trace do not fit; the message names every function.
    """
    known = [name for part in STOPS.values() for name in part.stops]
    missing = [
        f"{name} no longer runs in {key}"
        for key, part in STOPS.items()
        for name in part.stops
        if name not in trace.calls[key]
    ]
    missing += [
        f"{name} runs {len(lines)} lines and has no reason"
        for name, lines in sorted(trace.lines.items())
        if len(lines) > MOST_LINES and name not in known
    ]
    if missing:
        raise ValueError("edit STOPS in benchmarks/walk.py:\n" + "\n".join(missing))
    return HEAD + "".join(_section(trace.calls[key], part) for key, part in STOPS.items())


def _section(calls: list[str], part: Part) -> str:
    lines = [f"\n## {part.title}\n", f"{part.text}\n"]
    stops = [name for name in calls if name in part.stops]
    for number, name in enumerate(stops, 1):
        module, _, function = name.partition(":")
        link = f"[`{function}`](../sdp4bit/{module.replace('.', '/')}.py)"
        text = f"{number}. {link}: {part.stops[name]}"
        lines.append(textwrap.fill(text, 100, subsequent_indent="   ", break_on_hyphens=False))
    others = len(calls) - len(stops)
    lines.append(f"\nThe {others} other functions of this part run at most {MOST_LINES} lines each.\n")
    return "\n".join(lines)


def without_counts(text: str) -> str:
    """Return a page without the numbers of helpers, which depend on the versions of Python and torch."""
    return re.sub(r"The \d+ other functions", "The other functions", text)


def _run_rank(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    trace = traced_step()
    if rank == 0:
        results.put(page(trace))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Trace a step and write the page."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (f"{folder}/store", results), nprocs=RANKS)
    PAGE.write_text(results.get(), encoding="utf-8")


if __name__ == "__main__":
    main()
