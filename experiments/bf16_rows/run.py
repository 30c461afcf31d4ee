"""Compare rows of bf16 gradients with the same rows in fp32: time, bytes that are touched, memory.

    python -m experiments.bf16_rows.run --json results/bf16_rows.json

Operators: the gradients of six blocks of width 384 (10.6 million values) are copied into rows for two ranks by
FSDP2's operator, a block at a time, and quantized by `hadamard_quantize`, on one thread. Rounds are interleaved.

Step: two processes, two nodes of one rank, over gloo; the GPT of docs/speed.md (13.8 million parameters). Every
second step has fp32 rows; both kinds give the same bits, so that the run is one. Bytes and memory are counted in
one step of each kind: what FSDP2's copy-in reads and writes, what `hadamard_quantize` reads, and the most bytes
that tensors hold at once.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sdp4bit
from benchmarks.cluster_strategies import Workload, build_model, shard
from sdp4bit.engines.fsdp2 import hooks
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import message_layout
from sdp4bit.quantization.random import RoundingKey, derive_keys

RANKS = 2
WIDTH, BLOCKS = 384, 6
SHAPES = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH)]
SHAPES += [(WIDTH,)] * 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_fp32() -> Any:
    """Have the hook allocate fp32 rows, as it did before."""
    return mock.patch.object(hooks, "gradient_dtype", lambda: None)


def medians(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians in milliseconds, with the fastest and the quartiles."""
    return {
        name: {
            "median_ms": round(1e3 * statistics.median(values), 3),
            "fastest_ms": round(1e3 * min(values), 3),
            "quartiles_ms": [round(1e3 * q, 3) for q in statistics.quantiles(values, n=4)[::2]],
        }
        for name, values in samples.items()
    }


def time_operators(rounds: int) -> dict[str, Any]:
    """Time the copy-in, with its allocation, and the quantization to the widths of both hops."""
    torch.manual_seed(0)
    gradients = [[torch.randn(shape).mul_(1e-3).bfloat16() for shape in SHAPES] for _ in range(BLOCKS)]
    numel = sum(gradient.numel() for gradient in gradients[0])
    key = RoundingKey(*derive_keys(0, 0), first=0, row_stride=numel // RANKS + 32)
    settings = {8: key, 4: key._replace(dither=True)}
    layouts = {bits: message_layout(numel=numel // RANKS, bits=bits, group_size=128) for bits in settings}
    outs = {bits: torch.empty(RANKS, layout.nbytes, dtype=torch.uint8) for bits, layout in layouts.items()}
    samples: dict[str, list[float]] = {}
    messages: dict[tuple[int, int], Tensor] = {}

    for _ in range(rounds + 2):
        for kind, dtype in DTYPES.items():
            seconds = dict.fromkeys(["copy-in", *settings], 0.0)
            for index, block in enumerate(gradients):
                start = time.perf_counter()
                rows = torch.empty(numel, dtype=dtype)
                torch.ops.fsdp.chunk_cat(block, dim=0, num_chunks=RANKS, out=rows.view(RANKS, -1))
                seconds["copy-in"] += time.perf_counter() - start
                for bits, rounding in settings.items():
                    start = time.perf_counter()
                    ops.hadamard_quantize(
                        rows.view(RANKS, 1, -1),
                        out=outs[bits],
                        layout=layouts[bits],
                        hadamard=True,
                        rounding=rounding,
                    )
                    seconds[bits] += time.perf_counter() - start
                    expected = messages.setdefault((index, bits), outs[bits].clone())
                    assert torch.equal(outs[bits], expected)
            for part, spent in seconds.items():
                name = part if isinstance(part, str) else f"hadamard_quantize to {part} bits"
                samples.setdefault(f"{name}, {kind} rows", []).append(spent)
    return {
        "values": BLOCKS * numel,
        "rounds": rounds,
        "times": medians({name: values[2:] for name, values in samples.items()}),
    }


class Counts(TorchDispatchMode):
    """Counts bytes of FSDP2's copy-in, and follows the memory that tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_in = self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name == "fsdp::chunk_cat":
            self.copied_in += kwargs["out"].nbytes + sum(each.nbytes for each in args[0])
        for leaf in tree_leaves((args, kwargs)):
            self._see(leaf, is_new=False)
        for leaf in tree_leaves(result):
            self._see(leaf, is_new=True)
        return result

    def _see(self, leaf: Any, *, is_new: bool) -> None:
        storage = leaf.untyped_storage() if type(leaf) is Tensor else None
        if storage is None or storage._cdata in self._known:
            return
        key, nbytes = storage._cdata, storage.nbytes() if is_new else 0
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def rank_main(rank: int, port: int, steps: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    workload = Workload()
    model = shard(build_model(workload))
    comm = sdp4bit.quantize_communication(model, topology=1, config=sdp4bit.SDP4BitConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    quantize, rows = ops.hadamard_quantize, {}

    def noted(values: Tensor, **named: Any) -> None:
        rows["read"] = rows.get("read", 0) + values.nbytes
        quantize(values, **named)

    samples: dict[str, list[float]] = {kind: [] for kind in DTYPES}
    counts: dict[str, dict[str, int]] = {}
    for step in range(steps + 8):
        kind = list(DTYPES)[step % 2]
        counter = Counts() if step in (4, 5) else None
        tokens, targets = workload.batch(step, rank=rank)
        with ExitStack() as stack:
            if kind == "fp32":
                stack.enter_context(is_fp32())
            if counter is not None:
                rows.clear()
                stack.enter_context(mock.patch.object(ops, "hadamard_quantize", noted))
            dist.barrier()
            start = time.perf_counter()
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
            with counter or ExitStack():
                loss.backward()
            seconds = time.perf_counter() - start
            optimizer.step()
            optimizer.zero_grad()
        if counter is not None:
            counts[kind] = {
                "read and written by the copy-in": counter.copied_in,
                "read by hadamard_quantize": rows["read"],
                "most held at once by tensors that the backward pass allocates": counter.peak,
            }
        elif step >= 8:
            samples[kind].append(seconds)
    if rank == 0:
        pipe.send({"bytes": counts, "steps": steps // 2, "forward and backward": medians(samples)})
    comm.remove()
    dist.barrier()
    dist.destroy_process_group()


def count_step(steps: int) -> dict[str, Any]:
    """Count the bytes of a step of rank 0, and time forward and backward together."""
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    port = 29500 + int(time.time()) % 1000
    processes = [context.Process(target=rank_main, args=(rank, port, steps, sender)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    result = receiver.recv() if receiver.poll(150) else {}
    for process in processes:
        process.join(20)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    head = ["git", "rev-parse", "--short", "HEAD"]
    result = {
        "command": shlex.join(["python", "-m", "experiments.bf16_rows.run", *sys.argv[1:]]),
        "commit": subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": cpu.partition(": ")[2],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numba": version("numba")},
        "operators, one thread": time_operators(options.rounds),
        "step, 2 ranks of one thread": count_step(options.steps),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(text)


if __name__ == "__main__":
    main()
