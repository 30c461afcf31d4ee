"""Compile the Triton kernels for a GPU that is not there, and count what the compiler made of them.

    python -m tests.kernels.compiled_code           # all targets, as a Markdown table
    python -m tests.kernels.compiled_code --targets sm_90,gfx942 --all-columns

The host code of the operators is executed with CPU tensors up to the launch, which compiles for a given
target instead. Nothing runs, so nothing here says how long a kernel takes: what is counted is the code.

NVIDIA's machine code is read with cuobjdump and nvdisasm, which come with Triton's wheels for PyPI; AMD's is
the assembly that Triton itself writes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget  # None of this is public, so it may move in any release.
from triton.runtime import driver

from sdp4bit.kernels.triton import backend
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import Hadamard
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")},
}
TILES_PER_PROGRAM = 4
"""Tiles over which a count spreads what a program does once: what one has of a tensor of 64 MB on an H100."""
MULTIPROCESSORS = 132


class Launch(NamedTuple):
    """A kernel that an operator would have launched."""

    kernel: Any  # triton.compiler.CompiledKernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[list[Launch]]:
    """Let operators compile their kernels for a target instead of launching them; yield the list of these."""
    device = 1000 + list(TARGETS.values()).index(target)  # Triton keeps compiled kernels per device number
    active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda _: 0,
    )
    launches: list[Launch] = []

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
            named = dict(zip(kernel.arg_names, arguments, strict=True))
            launches.append(Launch(compiled, grid, named, options["num_warps"]))

        return launch

    with (
        patch.object(driver, "_active", active),
        patch.object(triton.JITFunction, "__getitem__", compile_only),
        patch.object(backend, "_IS_COMPILED", False),
        patch.object(backend, "_warp_size", lambda _: target.warp_size),
        patch.object(backend, "_multiprocessors", lambda _: MULTIPROCESSORS),
        ops.use_backend("triton"),
    ):
        yield launches


# The operators as a step calls them, on tensors of zeros: what they compile does not depend on a value.


def messages(count: int, layout: MessageLayout) -> torch.Tensor:
    return torch.zeros(count, layout.nbytes, dtype=torch.uint8)


KEY = RoundingKey(0xFFFFFFFF, 3, row_stride=1 << 20)
DITHER = KEY._replace(dither=True)


def subtract_quantize(numel=4096, bits=4, group_size=2048, stochastic=False, dtype=torch.float32, clip=1.0):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    replica = torch.zeros(numel, dtype=torch.bfloat16)
    out, rounding = messages(1, layout)[0], RoundingKey(1, 2) if stochastic else None
    named = {"replica": replica, "out": out, "layout": layout, "rounding": rounding, "clip": clip}
    ops.subtract_quantize(replica.to(dtype), **named)


def dequantize_add(numel=4096, bits=4, group_size=2048, accumulate=True, dtype=torch.bfloat16):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    replica = torch.zeros(2, numel, dtype=dtype)
    ops.dequantize_add(
        messages(2, layout), replica=replica, layout=layout, accumulate=accumulate, dither=None
    )


def hadamard_quantize(
    numel=4096, bits=8, group_size=128, hadamard=True, rounding=KEY, dtype=torch.float32, signs=0
):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=2)
    values = torch.zeros(2, 4, numel, dtype=dtype).transpose(0, 1)
    transform = Hadamard(signs) if hadamard else None
    out = messages(4, layout)
    ops.hadamard_quantize(values, out=out, layout=layout, hadamard=transform, rounding=rounding)


def dequantize_reduce_quantize(
    numel=4096, count=8, bits_in=8, group_size_in=128, bits=4, group_size=128, rounding=KEY, dither=None
):
    received = MessageLayout(numel=numel, bits=bits_in, group_size=group_size_in, parts=2)
    sent = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    out = messages(2, sent)
    ops.dequantize_reduce_quantize(
        messages(count, received),
        received=received,
        out=out,
        sent=sent,
        rounding=rounding,
        dither=dither,
    )


def dequantize_reduce_hadamard(
    numel=4096, count=4, bits=4, group_size=128, hadamard=True, dtype=torch.float32, signs=0, dither=None
):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    out, transform = torch.zeros(numel, dtype=dtype), Hadamard(signs) if hadamard else None
    ops.dequantize_reduce_hadamard(
        messages(count, layout),
        out=out,
        layout=layout,
        hadamard=transform,
        multiplier=1 / 128,
        dither=dither,
    )


class Case(NamedTuple):
    """A call of an operator whose code is counted."""

    run: Callable[[], None]
    bytes_per_value: float
    """Read and written for a value of the shard, or of the sum, as docs/benchmarks.md counts them."""


WEIGHT_SCALE, GRADIENT_SCALE = 2 / 2048, 2 / 128
CASES = {
    "subtract_quantize fp32": Case(subtract_quantize, 4 + 2 + 0.5 + WEIGHT_SCALE),
    "subtract_quantize bf16": Case(
        partial(subtract_quantize, dtype=torch.bfloat16), 2 + 2 + 0.5 + WEIGHT_SCALE
    ),
    "dequantize_add bf16": Case(dequantize_add, 0.5 + WEIGHT_SCALE + 2 + 2),
    "hadamard_quantize fp32 to 8": Case(hadamard_quantize, 4 + 1 + GRADIENT_SCALE),
    "hadamard_quantize bf16 to 8": Case(
        partial(hadamard_quantize, dtype=torch.bfloat16), 2 + 1 + GRADIENT_SCALE
    ),
    "hadamard_quantize fp32 to 4": Case(partial(hadamard_quantize, bits=4), 4 + 0.5 + GRADIENT_SCALE),
    "reduce_quantize 4 x 8 to 4": Case(
        partial(dequantize_reduce_quantize, count=4), 4 * (1 + GRADIENT_SCALE) + 0.5 + GRADIENT_SCALE
    ),
    "reduce_quantize 8 x 8 to 4": Case(
        partial(dequantize_reduce_quantize, count=8), 8 * (1 + GRADIENT_SCALE) + 0.5 + GRADIENT_SCALE
    ),
    "reduce_hadamard 4 x 4 to fp32": Case(dequantize_reduce_hadamard, 4 * (0.5 + GRADIENT_SCALE) + 4),
    "hadamard_quantize fp32 to dithered 8": Case(
        partial(hadamard_quantize, rounding=DITHER), 4 + 1 + GRADIENT_SCALE
    ),
    "hadamard_quantize fp32 to dithered 4": Case(
        partial(hadamard_quantize, bits=4, rounding=DITHER), 4 + 0.5 + GRADIENT_SCALE
    ),
    "reduce_quantize 4 x 8 to dithered 4": Case(
        partial(dequantize_reduce_quantize, count=4, rounding=DITHER),
        4 * (1 + GRADIENT_SCALE) + 0.5 + GRADIENT_SCALE,
    ),
    "reduce_quantize 4 x dithered 8 to 4": Case(
        partial(dequantize_reduce_quantize, count=4, rounding=DITHER, dither=DITHER),
        4 * (1 + GRADIENT_SCALE) + 0.5 + GRADIENT_SCALE,
    ),
    "reduce_hadamard 4 x dithered 4 to fp32": Case(
        partial(dequantize_reduce_hadamard, dither=DITHER), 4 * (0.5 + GRADIENT_SCALE) + 4
    ),
}
# The widths below 4 bits: weights in groups of 128, clipped with 2 bits.
for _bits in (3, 2):
    _weights = {"bits": _bits, "group_size": 128}
    _sent = _bits / 8 + GRADIENT_SCALE
    CASES |= {
        f"subtract_quantize fp32 to {_bits}": Case(
            partial(subtract_quantize, **_weights, clip=0.6 if _bits == 2 else 1.0), 4 + 2 + _sent
        ),
        f"dequantize_add {_bits} to bf16": Case(partial(dequantize_add, **_weights), _sent + 2 + 2),
        f"hadamard_quantize fp32 to {_bits}": Case(partial(hadamard_quantize, bits=_bits), 4 + _sent),
        f"reduce_quantize 4 x 8 to {_bits}": Case(
            partial(dequantize_reduce_quantize, count=4, bits=_bits), 4 * (1 + GRADIENT_SCALE) + _sent
        ),
        f"reduce_hadamard 4 x {_bits} to fp32": Case(
            partial(dequantize_reduce_hadamard, bits=_bits), 4 * _sent + 4
        ),
    }


class GPU(NamedTuple):
    """What a data sheet says of a GPU."""

    multiprocessors: int
    gigahertz: float
    terabytes: float
    """Bandwidth of its memory, per second."""

    def budget(self, bytes_per_value: float, *, share: float = 0.92, lanes: int = 128) -> float:
        """Return the instructions per value that can be issued while memory moves at a share of its speed."""
        issued = self.multiprocessors * lanes * self.gigahertz * 1e9
        return issued * bytes_per_value / (share * self.terabytes * 1e12)


GPUS = {"H100": GPU(132, 1.755, 3.35), "H200": GPU(132, 1.755, 4.8), "B200": GPU(148, 1.85, 8.0)}


# Reading code.


def nvidia_tool(name: str) -> str | None:
    """Return the path of cuobjdump or nvdisasm: Triton's own, or that of TRITON_*_PATH; None if missing."""
    try:
        path: str = getattr(triton.knobs.nvidia, name).path
    except (AttributeError, RuntimeError):
        return None
    return path


def missing_tools(target: GPUTarget) -> str | None:
    """Return why code for a target cannot be read here, None if it can."""
    missing = [name for name in ("cuobjdump", "nvdisasm") if nvidia_tool(name) is None]
    if target.backend != "cuda" or not missing:
        return None
    return f"needs {' and '.join(missing)}, see CONTRIBUTING.md"


def spilled_bytes(assembly: dict[str, Any]) -> int | None:
    """Return stack and local memory per thread, None without the tool that tells."""
    if "amdgcn" in assembly:
        # Scalar registers are spilled into lanes of vector registers, not into memory.
        found = r"\.(?:vgpr_spill_count|private_segment_fixed_size): +(\d+)"
        counts = re.findall(found, assembly["amdgcn"])
        return sum(map(int, counts)) if counts else None
    tool = nvidia_tool("cuobjdump")
    if tool is None:
        return None
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", _read_cubin(assembly, tool, "-res-usage"))))


def _read_cubin(assembly: dict[str, Any], *command: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly["cubin"])
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True, kw_only=True)
class Code:
    """What a kernel was compiled to, per thread."""

    registers: int
    spilled_bytes: int
    values: int
    """Values of a tile that belong to a thread."""
    once: int
    """Instructions before and after the loop over tiles."""
    per_tile: int
    """Instructions of a round of that loop, by the common way."""
    mix: Counter[str]
    """How often each instruction occurs in the loop, without its modifiers."""
    accesses: Counter[str]
    """How often each access to global memory occurs, with its modifiers."""

    @property
    def per_value(self) -> float:
        """Instructions per value, with TILES_PER_PROGRAM tiles per program."""
        return (self.per_tile + self.once / TILES_PER_PROGRAM) / self.values

    @property
    def barriers(self) -> int:
        """Barriers per tile."""
        return self.mix["BAR"] + self.mix["s_barrier"]

    @property
    def conversions_per_value(self) -> float:
        """Conversions between integers and floats per value, which are slower than additions."""
        kinds = r"I2F|F2I|I2FP|v_cvt_(f32_[iu]32|[iu]32_f32|f32_ubyte)"
        return sum(n for name, n in self.mix.items() if re.match(kinds, name)) / self.values


_INSTRUCTION = {
    # A label, or the predicate, the name and the rest of an instruction.
    "cuda": re.compile(
        r"^(\.L_x_\d+|\$\S+):|/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*)", re.MULTILINE
    ),
    "hip": re.compile(
        r"^(\.LBB\d+_\d+):|^\s+()((?:v|s|ds|global|flat|buffer|scratch)_\w+)(.*)", re.MULTILINE
    ),
}
_BRANCHES = ("BRA", "s_branch", "s_cbranch")
_ENDS = ("EXIT", "s_endpgm")
_FILLING = ("NOP", "s_nop")


class Block(NamedTuple):
    """Instructions that are executed one after the other."""

    names: list[str]
    next: list[int]
    """Numbers of the blocks that may follow."""

    @property
    def cost(self) -> int:
        return sum(name not in _FILLING for name in self.names)


def read_blocks(text: str, family: str) -> list[Block]:
    """Return the blocks of a program, the first one first; subroutines, of rare divisions, are left out."""
    lines: list[
        tuple[str, str | None, bool]
    ] = []  # name, target of a branch, whether what follows may follow
    starts, labels = {0}, {}
    for label, predicate, name, rest in _INSTRUCTION[family].findall(text):
        if label.startswith("$"):
            break
        if label:
            labels[label] = len(lines)
            starts.add(len(lines))
            continue
        # AMD's code jumps over what no lane of a wave has to do, which is not the common way.
        is_branch = name.startswith(_BRANCHES) and name != "s_cbranch_execz"
        target = re.search(r"\.L(?:_x_|BB\d+_)\d+", rest) if is_branch else None
        ends = name.startswith(_ENDS) or (target is not None and not name.startswith("s_cbranch"))
        lines.append((name, target and target[0], not ends or bool(predicate)))
        if target or ends:
            starts.add(len(lines))
    cuts = sorted(start for start in starts if start < len(lines))
    number = {start: index for index, start in enumerate(cuts)}
    blocks = []
    for start, end in zip(cuts, [*cuts[1:], len(lines)], strict=True):
        _, target, goes_on = lines[end - 1]
        follows = [end] if goes_on and end < len(lines) else []
        follows += [labels[target]] if target else []
        blocks.append(Block([name for name, *_ in lines[start:end]], [number[x] for x in follows]))
    return blocks


def _shortest(blocks: list[Block], start: int, ends: set[int], avoided: set[int]) -> list[int]:
    """Return the cheapest way from a block to one of others, both included."""
    queue = [(blocks[start].cost, [start])]
    seen = set(avoided)
    while queue:
        cost, way = heappop(queue)
        if way[-1] in ends:
            return way
        if way[-1] in seen:
            continue
        seen.add(way[-1])
        for block in blocks[way[-1]].next:
            if block not in seen or block in ends:
                heappush(queue, (cost + blocks[block].cost, [*way, block]))
    raise ValueError(f"no way from block {start} to {sorted(ends)}")


def split_loop(blocks: list[Block]) -> tuple[list[str], list[str]]:
    """Return the instructions of a round of the outermost loop, and those before and after it.

    Where the program may skip some, it does: what is counted is the common way, in which no row ends, no
    division meets a subnormal number and no group is longer than what a program holds.
    """
    reached: dict[int, set[int]] = {}  # blocks that can be reached from each

    def reach(start: int) -> set[int]:
        if start not in reached:
            found, todo = set(), list(blocks[start].next)
            while todo:
                block = todo.pop()
                if block not in found:
                    found.add(block)
                    todo += blocks[block].next
            reached[start] = found
        return reached[start]

    # The loop is the largest set of blocks that reach each other, its head the one that is entered first.
    loops = [{b for b in reach(a) if a in reach(b)} for a in range(len(blocks)) if a in reach(a)]
    loop = max(loops, key=lambda x: sum(blocks[b].cost for b in x))
    ends = {index for index, block in enumerate(blocks) if any(x.startswith(_ENDS) for x in block.names)}
    entry = _shortest(blocks, 0, loop, set())
    head = entry[-1]
    latches = {block for block in loop if head in blocks[block].next}
    round_ = _shortest(blocks, head, latches, set(range(len(blocks))) - loop)
    leaving = [
        _shortest(blocks, block, ends, loop) for a in loop for block in blocks[a].next if block not in loop
    ]
    after = min(leaving, key=lambda way: sum(blocks[b].cost for b in way), default=[])

    def names(way: list[int]) -> list[str]:
        return [name for block in way for name in blocks[block].names if name not in _FILLING]

    return names(round_), names(entry[:-1] + after)


def read_code(launch: Launch) -> Code:
    """Return what a kernel was compiled to.

    Raises:
        RuntimeError: the target's tools are missing, see :func:`missing_tools`.
    """
    assembly, named = launch.kernel.asm, launch.arguments
    target = launch.kernel.metadata.target
    reason = missing_tools(target)
    if reason:
        raise RuntimeError(reason)
    if target.backend == "cuda":
        usage = _read_cubin(assembly, nvidia_tool("cuobjdump"), "-res-usage")
        registers = int(re.search(r"REG:(\d+)", usage)[1])
        text = _read_cubin(assembly, nvidia_tool("nvdisasm"), "-c")
    else:
        text = assembly["amdgcn"]
        registers = int(re.search(r"\.vgpr_count: +(\d+)", text)[1])
    blocks = read_blocks(text, target.backend)
    inside, outside = split_loop(blocks)
    slots = named["ROWS"] if "ROWS" in named else named["GROUPS"] * named["SLOTS"]
    memory = re.compile("LDG|STG|global_|buffer_(load|store)")
    return Code(
        registers=registers,
        spilled_bytes=spilled_bytes(assembly) or 0,
        values=max(1, slots * 32 // (launch.num_warps * target.warp_size)),
        once=len(outside),
        per_tile=len(inside),
        mix=Counter(name.split(".")[0] for name in inside),
        accesses=Counter(name for block in blocks for name in block.names if memory.match(name)),
    )


def compile_case(name: str, target: GPUTarget) -> Code:
    """Return the code of a case for a target."""
    with compiling_for(target) as launches:
        CASES[name].run()
    (launch,) = launches
    return read_code(launch)


def table(targets: list[str], *, all_columns: bool = False) -> str:
    """Return the code of all cases as a Markdown table."""
    titles = ["kernel", "target", "instructions per value", "per tile", "once", "values", "registers"]
    titles += ["spilled bytes", "barriers", "conversions per value", *(f"{gpu} allows" for gpu in GPUS)]
    titles += ["accesses", "most frequent"] if all_columns else []
    lines = [titles, ["---"] * len(titles)]
    for name, case in CASES.items():
        for target in targets:
            code = compile_case(name, TARGETS[target])
            cells = [name, target, f"{code.per_value:.1f}", code.per_tile, code.once, code.values]
            cells += [code.registers, code.spilled_bytes, code.barriers, f"{code.conversions_per_value:.1f}"]
            cells += [f"{gpu.budget(case.bytes_per_value):.0f}" for gpu in GPUS.values()]
            if all_columns:
                for counted in (code.accesses, code.mix):
                    cells.append(", ".join(f"{n} {what}" for what, n in counted.most_common(16)))
            lines.append(list(map(str, cells)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compiled_code", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--all-columns", action="store_true", help="accesses to memory and the mix as well")
    arguments = parser.parse_args()
    print(table(arguments.targets.split(","), all_columns=arguments.all_columns))


if __name__ == "__main__":
    main()
