"""Time the lossless coder on one core: weights per second, encoding and decoding apart from each other.

    python -m benchmarks.lossless_speed --values 8388608 --sizes 3e-4,1e-4,1e-5,1e-6

The weights are normal numbers with a standard deviation of 0.02, moved by normal amounts of each size,
rounded to bf16 before and after; a step of Adam moves weights by a third to a half of its learning rate.
Rounds are interleaved with a copy of the 16-bit weights, and medians count. Seconds are those that the core
has worked for this thread: on a machine that does other work, the clock on the wall would count that, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from sdp4bit.quantization import ops
from sdp4bit.quantization.lossless import read_header
from sdp4bit.quantization.lossless_layout import largest_message


def _seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def measure(values: int, size: float, *, rounds: int) -> dict[str, float]:
    """Return bits per weight, and millions of weights per second of "encode", "decode" and "copy"."""
    generator = torch.Generator().manual_seed(0)
    main = 0.02 * torch.randn(values, generator=generator)
    held = main.bfloat16()
    new = (main + size * torch.randn(values, generator=generator)).bfloat16()
    message = torch.empty(largest_message(values), dtype=torch.uint8)
    row, copied = held.clone(), torch.empty_like(held)
    runs: dict[str, Callable[[], object]] = {
        "encode": lambda: ops.encode_change(new, held=held, out=message),
        "decode": lambda: ops.decode_change(message[None], rows=row[None]),
        "copy": lambda: copied.copy_(held),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            row.copy_(held)
            seconds = _seconds(run)
            if number:  # the first round compiles, and touches the memory
                taken[name].append(seconds)
            if name == "decode" and not torch.equal(row, new):
                raise AssertionError("what was decoded is not what was encoded")
    speeds = {name: values / statistics.median(found) / 1e6 for name, found in taken.items()}
    return {"bits": 8 * read_header(message).used / values, **speeds}


def main() -> None:
    """Print a table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 23)
    parser.add_argument("--sizes", default="3e-4,1e-4,1e-5,1e-6", help="of movements, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| movement | bits per weight | encode, M weights/s | decode | copy |")
    print("| --- | --- | --- | --- | --- |")
    for size in arguments.sizes.split(","):
        found = measure(arguments.values, float(size), rounds=arguments.rounds)
        cells = f"{found['bits']:.2f}", *(f"{found[name]:.0f}" for name in ("encode", "decode", "copy"))
        print(f"| {size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
