"""The table of docs/which-method.md: published seconds and losses of methods that people choose between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.loss_tables import Loss, losses
from benchmarks.markdown import percent, table
from benchmarks.speed_tables import RATES, rates_of, seconds_of
from sdp4bit_lab.compare.paired import confidence_interval

EXACT = "0"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Published results."""

    cluster: dict[str, Any]
    """Seconds of two nodes of one rank."""
    accuracy: Sequence[dict[str, Any]]
    hooks: dict[str, Any]
    """The study `ddp_hooks`."""
    local_steps: Sequence[dict[str, Any]]
    """The runs of the study `local_steps`."""

    def preset(self, name: str) -> str:
        """Return the loss of a preset, of the latest recipe that has it."""
        found: Loss = next(loss for each in self.accuracy for loss in losses(each) if loss.strategy == name)
        return f"{percent(found.percent, digits=2)} ({found.interval_text(digits=2)})"

    def hook(self, name: str) -> str:
        """Return the loss of a hook of DDP."""
        (row,) = (row for each in self.hooks["tables"] for row in each["rows"] if row[0] == name)
        low, high = (float(end) for end in row[4].removesuffix(" %").split(" to "))
        return (
            f"{percent(float(row[3].removesuffix(' %')), digits=2)} ({low:+.2f} to {percent(high, digits=2)})"
        )

    def local(self, every: int) -> str:
        """Return the loss of local steps of two replicas with 4-bit exchanges."""
        synchronous, found = {}, {}
        for run in self.local_steps:
            setting = run["setting"]
            if setting["replicas"] == 2 and "tokens" not in setting:
                if setting["every"] == 0:
                    synchronous[setting["seed"]] = run["loss"]
                elif setting["every"] == every and setting.get("bits") == 4:
                    found[setting["seed"]] = run["loss"]
        percents = [100 * (loss / synchronous[seed] - 1) for seed, loss in found.items()]
        interval = confidence_interval(percents)
        assert interval is not None
        mean = percent(sum(percents) / len(percents), digits=2)
        return f"{mean} ({interval[0]:+.2f} to {percent(interval[1], digits=2)})"


Losses = Callable[[Sources], str]
_METHODS: tuple[tuple[str, str, int, Losses, str], ...] = (
    ("FSDP2, gloo's own collectives", "fsdp2", 1, lambda _: EXACT, "nothing"),
    ("FSDP2, pairwise exchange", "fair", 1, lambda _: EXACT, "collectives that gloo does not have"),
    ("FSDP2, bf16 gradients", "fair-bf16", 1, lambda s: s.hook("ddp-bf16"), "one setting"),
    ("DDP", "ddp", 1, lambda _: EXACT, "a model that fits one device"),
    ("DDP, bf16 hook", "ddp-bf16", 1, lambda s: s.hook("ddp-bf16"), "DDP, one line"),
    (
        "DDP, PowerSGD of rank 4",
        "ddp-powersgd",
        1,
        lambda s: s.hook("ddp-powersgd-4"),
        "DDP, one line, a rank",
    ),
    *(
        (
            f"{every} local steps (DiLoCo), 4 bits",
            "ddp-sdp4bit",
            every,
            lambda s, n=every: s.local(n),
            "an outer optimizer",
        )
        for every in (8, 32)
    ),
    ("sdp4bit on DDP", "ddp-sdp4bit", 1, lambda s: s.hook("ddp-sdp4bit"), "DDP, a package, one line"),
    ("sdp4bit on FSDP2", "sdp4bit", 1, lambda s: s.preset("sdp4bit"), "a package, one line"),
    (
        "sdp4bit-w3g3.5 on FSDP2",
        "sdp4bit-w3g3.5",
        1,
        lambda s: s.preset("sdp4bit-w3g3.5"),
        "the same, a preset",
    ),
    ("sdp4bit-w2g2 on FSDP2", "sdp4bit-w2g2", 1, lambda s: s.preset("sdp4bit-w2g2"), "the same, a preset"),
)
"""Label, timed strategy, steps from one exchange to the next, loss, demands."""


def method_table(sources: Sources) -> str:
    """Return the methods, fastest at the slowest rate first."""
    rows, rates = seconds_of(sources.cluster), rates_of(sources.cluster)

    def seconds(strategy: str, every: int, rate: str) -> float:
        timed = float(rows[strategy][rate]["seconds_per_step"])
        local = float(rows["compute"][rate]["seconds_per_step"])
        return timed if every == 1 else local + (timed - local) / every

    def cells(method: tuple[str, str, int, Losses, str]) -> list[str]:
        label, strategy, every, loss, asks = method
        sent = rows[strategy][rates[0]]["tx_bytes_per_node_per_step"] / sources.cluster["parameters"] / every
        times = [f"{seconds(strategy, every, rate):.2f}" for rate in rates]
        return [label, *times, f"{sent:.2f}", loss(sources), asks]

    ordered = sorted(_METHODS, key=lambda method: seconds(method[1], method[2], rates[0]))
    titles = ["method", *(f"s per step, {RATES[rate]}" for rate in rates), "bytes", "loss", "asks for"]
    return table(titles, [cells(method) for method in ordered])
