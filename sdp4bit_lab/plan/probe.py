"""Measure a cluster's bandwidths, latency, quantization speed and hosts for the planner."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdp4bit.addresses import page
from sdp4bit.collectives.topology import Topology, create_topology, destroy_topology, host_name
from sdp4bit.collectives.transport import start_all_to_all
from sdp4bit.config import GradientConfig
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import BLOCK
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import message_layout, round_up
from sdp4bit.quantization.random import RoundingKey, derive_keys
from sdp4bit.traffic import Grid, format_bytes
from sdp4bit_lab.common.files import wrapped, write_atomically
from sdp4bit_lab.common.machine import pasted, software
from sdp4bit_lab.common.progress import end_progress, phase
from sdp4bit_lab.common.ranks import Ranks, gather_over_ranks, run_on_all_ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.plan.config import PROBE_FORMAT, ProbeConfig
from sdp4bit_lab.plan.host_probe import measure_host
from sdp4bit_lab.plan.traffic import gradient_exchange

WARM_UPS = 2
TINY_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speed of one level for a rank while all ranks send: slowest rank, median of the rounds."""

    sent_bytes: int
    """Sent by a rank in one exchange."""
    seconds: float
    fastest: float
    slowest: float
    """Seconds of the slowest round; `fastest` of the fastest."""
    latency: float
    """Seconds of an exchange of a few bytes."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a rank, excluding the latency."""
        return self._rate(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Bandwidths of the slowest and the fastest round."""
        return self._rate(self.slowest), self._rate(self.fastest)

    def _rate(self, seconds: float) -> float:
        # At most half counts as latency, because on a very fast or noisy link the difference would be noise.
        return self.sent_bytes / max(seconds - self.latency, seconds / 2)


def probe(config: ProbeConfig, *, ranks: Ranks) -> dict[str, Any]:
    """Measure, write on the first rank of each machine, and print on rank 0; return the measurements."""
    result = measure(config, ranks=ranks)

    def report() -> None:
        if ranks.local_rank == 0:  # so that every machine can decide by the plan
            write_atomically(config.out, json.dumps(result, indent=2) + "\n")
        if ranks.is_first:
            sys.stdout.write(f"{describe(result, out=config.out)}\n")

    run_on_all_ranks(report)
    return result


def measure(config: ProbeConfig, *, ranks: Ranks) -> dict[str, Any]:
    """Return the measurements, identical on every rank.

    All nodes exchange internally at the same time, then all ranks exchange between nodes, then all ranks
    quantize, and at last train a tiny model.

    Raises:
        SettingError: on all ranks: ranks that do not fill the nodes.
    """
    device, rounds = ranks.device, config.rounds
    hosts = gather_over_ranks(host_name(), what="names of the hosts")
    topology = run_on_all_ranks(lambda: _topology(config))
    per_rank = round(config.megabytes * 1e6)
    phase("timing exchanges inside the nodes and between them")
    intra = _link(topology.intra, sent_bytes=per_rank, rounds=rounds, device=device)
    inter = _link(topology.inter, sent_bytes=per_rank, rounds=rounds, device=device)
    destroy_topology(topology)
    # A single rank sends nothing; time its kernels as for two ranks.
    quantize, moved = _quantization(config.quantized_values, ranks=max(2, len(hosts)), device=device)
    phase("timing the quantization")
    quantization_seconds = _seconds(quantize, rounds=rounds, device=device)
    phase("timing the host: steps of a tiny model with plain FSDP2 and with sdp4bit")
    per_node = 1 if topology.nodes == 1 else topology.ranks_per_node
    host = measure_host(ranks, ranks_per_node=per_node, rounds=config.host_rounds)
    end_progress()
    return {
        "format": PROBE_FORMAT,
        "name": f"{hosts[0]}, {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}",
        "nodes": topology.nodes,
        "devices_per_node": topology.ranks_per_node,
        "inter_bandwidth": inter and inter.bandwidth * topology.ranks_per_node,
        "intra_bandwidth": intra and intra.bandwidth,
        "latency": max((link.latency for link in (intra, inter) if link), default=0.0),
        "quantization_bandwidth": moved / statistics.median(quantization_seconds),
        "host_seconds": host.plain,
        "added_host_seconds": host.added,
        "host_computes": device.type == "cpu",
        "measured": {
            "software": software(device),
            "torch": torch.__version__,
            "backend": dist.get_backend(),
            "kernels": ops.backend_name(device.type),
            "hosts": len(set(hosts)),
            "rounds": rounds,
            "intra": intra and vars(intra),
            "inter": inter and vars(inter),
            "quantization_seconds": statistics.median(quantization_seconds),
            "quantization_fastest": min(quantization_seconds),
            "quantization_slowest": max(quantization_seconds),
            "quantization_bytes": moved,
            "quantized_values": config.quantized_values,
            "host_rounds": config.host_rounds,
        },
    }


def _topology(config: ProbeConfig) -> Topology:
    spec = config.parallel.ranks_per_node
    try:
        return create_topology("auto" if spec is None else spec)
    except ValueError as error:
        raise SettingError(str(error)) from error


def _link(group: ProcessGroup | None, *, sent_bytes: int, rounds: int, device: torch.device) -> Link | None:
    """Return the measurement of a level, or None if it has one rank; a collective of all ranks."""
    if group is None:
        return None

    def exchange(row_bytes: int) -> list[float]:
        sent = torch.zeros(group.size(), row_bytes, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        return _seconds(lambda: start_all_to_all(received, sent, group).wait(), rounds=rounds, device=device)

    peers = group.size() - 1
    row_bytes = round_up(-(-sent_bytes // peers), TINY_BYTES)
    latency = statistics.median(exchange(TINY_BYTES))
    seconds = exchange(row_bytes)
    return Link(
        sent_bytes=row_bytes * peers,
        seconds=statistics.median(seconds),
        fastest=min(seconds),
        slowest=max(seconds),
        latency=latency,
    )


def _seconds(work: Callable[[], object], *, rounds: int, device: torch.device) -> list[float]:
    """Return the slowest rank's time of each round."""
    seconds = torch.zeros(rounds, dtype=torch.float64, device=device)
    for number in range(-WARM_UPS, rounds):
        dist.barrier()
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        if number >= 0:
            seconds[number] = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return [float(value) for value in seconds]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quantization(values: int, *, ranks: int, device: torch.device) -> tuple[Callable[[], None], float]:
    """Return the operators of a one-level reduction of this many gradients, and the bytes they move."""
    config, row = GradientConfig(inside_one_node=True), values // ranks
    if config.exempts(numel=row):
        raise SettingError(
            f"--quantized-values {values} is {row} per row on {ranks} ranks, too few to be quantized: "
            f"give at least {config.min_numel * ranks}"
        )
    assert config.intra_bits is not None
    layout = message_layout(numel=row, bits=config.intra_bits, group_size=config.intra_group_size)
    messages = torch.empty(ranks, layout.nbytes, dtype=torch.uint8, device=device)
    gradient = torch.randn(ranks, 1, row, device=device)
    result = torch.empty(row, device=device)
    rounding = RoundingKey(*derive_keys(0, 0), row_stride=round_up(row, BLOCK))

    def reduce() -> None:
        ops.hadamard_quantize(gradient, out=messages, layout=layout, hadamard=True, rounding=rounding)
        ops.dequantize_reduce_hadamard(
            messages, out=result, layout=layout, hadamard=True, multiplier=INVERSE_FACTOR, dither=None
        )

    grid = Grid(nodes=1, ranks_per_node=ranks)
    return reduce, gradient_exchange(row, grid=grid, config=config).moved_bytes


def describe(result: dict[str, Any], *, out: Path) -> str:
    """Return the measurements as text of 80 columns.

    Args:
        result: result of `measure`.
        out: written file.
    """
    measured, nodes, per_node = result["measured"], result["nodes"], result["devices_per_node"]
    shape = f"{nodes} node{'s' * (nodes > 1)} with {per_node} rank{'s' * (per_node > 1)} each"
    lines = []
    links = {level: Link(**measured[level]) for level in ("intra", "inter") if measured[level]}
    for level, name, ranks in (
        ("intra", "intra-node, per rank", 1),
        ("inter", "inter-node, per node", per_node),
    ):
        if level not in links:
            lines.append(f"{name}: not measured (one rank)")
            continue
        link = links[level]
        slowest, fastest = (format_bytes(ranks * rate) for rate in link.spread)
        lines.append(
            f"{name}: {format_bytes(ranks * link.bandwidth)}/s per direction ({slowest}/s to {fastest}/s in "
            f"{measured['rounds']} rounds), latency {1e6 * link.latency:.0f} us"
        )
    slowest, fastest = (
        format_bytes(measured["quantization_bytes"] / measured[f"quantization_{end}"])
        for end in ("slowest", "fastest")
    )
    lines.append(
        f"quantization ({measured['kernels']}): {format_bytes(result['quantization_bandwidth'])}/s read and "
        f"written per rank ({slowest}/s to {fastest}/s)"
    )
    added = result["added_host_seconds"]
    lines.append(
        f"host: {1e3 * result['host_seconds']:.2f} ms per parameter group with plain FSDP2, "
        + ("sdp4bit not measured (one rank)" if added is None else f"{1e3 * added:.2f} ms more with sdp4bit")
    )
    if len(links) == 2 and links["intra"].bandwidth < links["inter"].bandwidth:
        lines.append(
            f"WARNING: a rank is slower inside its node ({format_bytes(links['intra'].bandwidth)}/s) than "
            f"between nodes ({format_bytes(links['inter'].bandwidth)}/s): check NVLink, P2P and "
            "--ranks-per-node"
        )
    if nodes > measured["hosts"]:
        lines.append(f"note: {nodes} nodes on {measured['hosts']} host, without a network between them")
    how = page("planning#your-cluster")
    named = [f"{result['name']}: {shape}", *lines]
    following = f"next: sdp4bit plan --probe {out} --device-tflops X; to measure X: {how}"
    report = [measured["software"], f"{shape}, {measured['backend']}, {measured['hosts']} host names", *lines]
    return wrapped([*named, following]) + "\n" + pasted(report)
