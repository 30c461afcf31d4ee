"""Time training steps of a GPT on an emulated cluster: nodes joined by shaped links, real sockets.

    python -m benchmarks.cluster --nodes 2 --ranks-per-node 1 --rates 100mbit,250mbit,1gbit --json FILE
    python -m benchmarks.cluster --device cuda --hidden 1024 --layers 12 --rates 1gbit,10gbit,unshaped

The first trains on CPUs over gloo. With `--device cuda` all ranks share one GPU, over NCCL's sockets.

Every strategy (benchmarks/cluster_strategies.py) is built once and warmed up on unshaped links. At each rate,
every round runs one step of every strategy in a new random order, so that disturbances affect all of them.
Results are medians over the rounds; the spread is (slowest - fastest) / median, and ratios are between steps
of the same round. Bytes are read from the interfaces' counters and compared with the strategy's own count.
Needs root and iproute2; creates network namespaces and removes them, even when killed. If they cannot be
created, `--device cuda` limits NCCL's sockets instead, with one rank per node (benchmarks/send_limit.py);
`--links send` does so in any case. The file of --json is written after each rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import cluster_report
from benchmarks.cluster_network import Network, NetworkError, rate_in_bits, reason_to_skip
from benchmarks.cluster_report import Sample
from benchmarks.send_limit import LimitedSenders, reason_against_limit
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.launch.shared_gpu import multi_process_service, nccl_variables

EXIT_IMPOSSIBLE = 2
PORT = 29500
UNSHAPED = "unshaped"
ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 4
"""Opens connections, rebuilds DDP's buckets, starts PowerSGD and compiles kernels."""
MINIMUM_ROUNDS = 3
PROFILED_STEPS, TRACED_STEPS = 20, 3
MOST_TRACE_BYTES = 4 << 20
"""Larger traces are not kept."""
BUILD_TIMEOUT, STEP_TIMEOUT = 240.0, 120.0
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Keep freed memory in the process; otherwise every step pays for zeroed pages."""

_PRIORITY = ["sh", "-c", 'echo -10 2> /dev/null > /proc/self/autogroup; exec nice -n -10 "$@"', "sh"]
"""Raise the priority of the ranks. If the kernel groups processes by session, nice values only count inside
the group, so the group is raised as well."""


class Ranks:
    """Workers on the nodes, which all get the same commands."""

    def __init__(
        self, network: Network | LimitedSenders, *, ranks_per_node: int, log: Path, device: str = "cpu"
    ) -> None:
        """Start one worker per rank. On CPUs each has its own core if there are enough."""
        self._answers: list[queue.Queue[str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._log = log
        nodes, cores = len(network.nodes), sorted(os.sched_getaffinity(0))
        for rank in range(nodes * ranks_per_node):
            environment = {
                **os.environ,
                **_MALLOC,
                "RANK": str(rank),
                "WORLD_SIZE": str(nodes * ranks_per_node),
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": network.interface,
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # read with --deterministic
                "OMP_NUM_THREADS": "1",
                "NUMBA_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            }
            pin = ["taskset", "-c", str(cores[rank % len(cores)])]
            if device == "cuda":
                environment |= nccl_variables(rank, interface=network.interface)
                pin = []  # NCCL has threads
            with log.open("ab") as errors:
                process = network.start(
                    rank // ranks_per_node,
                    [*_PRIORITY, *pin, sys.executable, "-m", "benchmarks.cluster_worker", device],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            answers: queue.Queue[str] = queue.Queue()
            threading.Thread(target=_collect, args=(process.stdout, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    def ask(self, command: dict[str, Any], *, timeout: float) -> list[dict[str, Any]]:
        """Return every rank's answer; NetworkError with its last output if a rank exited or hangs."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure("a rank exited") from None
        deadline = time.monotonic() + timeout
        answers = []
        for rank, waiting in enumerate(self._answers):
            try:
                line = waiting.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failure(f"rank {rank} did not answer within {timeout:.0f} s") from None
            if not line:
                raise self._failure(f"rank {rank} exited")
            answers.append(json.loads(line))
        return answers

    def _failure(self, reason: str) -> NetworkError:
        lines = self._log.read_text(errors="replace").splitlines()
        return NetworkError("\n".join([reason, *lines[-30:]]))


def _collect(stream: Any, answers: queue.Queue[str]) -> None:
    """Put every line into the queue, then an empty one at the end."""
    for line in itertools.chain(stream, [""]):
        answers.put(line)


class Measurement:
    """Samples of strategies at every rate, and the loss of every step."""

    def __init__(
        self,
        network: Network | LimitedSenders,
        ranks: Ranks,
        *,
        build: dict[str, Any],
        chosen: argparse.Namespace,
    ) -> None:
        """Prepare the measurement.

        Args:
            build: command that builds strategies, without their names.
        """
        self._network = network
        self._ranks = ranks
        self._build = build
        self._chosen = chosen
        self._order = random.Random(chosen.seed)
        self.samples: list[Sample] = []
        self.losses: dict[str, list[float]] = {}
        """Mean of all ranks after each step, warm-up included, by strategy."""
        self.parameters = 0

    def run(self, strategies: Sequence[str]) -> Iterator[None]:
        """Measure all strategies; a part of the samples is complete at each yield.

        Strategies that do not fit into memory together (`--separately`) are built one after the other, twice,
        the second time in the opposite order.
        """
        turns = [list(strategies)]
        if self._chosen.separately:
            alone = [[name] for name in self._order.sample(turns[0], len(turns[0]))]
            turns = [*alone, *reversed(alone)]
        share = len(strategies) / sum(map(len, turns))  # of rounds
        for names in turns:
            self._prepare(names)
            for rate in self._chosen.rates.split(","):
                self._measure(names, rate, share=share, seconds=self._chosen.seconds_per_rate / len(turns))
                yield

    def _prepare(self, names: Sequence[str]) -> None:
        """Build strategies and train the warm-up on unshaped links."""
        self._network.set_rate(None)
        self.parameters = self._ranks.ask({**self._build, "build": names}, timeout=BUILD_TIMEOUT)[0][
            "parameters"
        ]
        for name in names:
            answers = self._ranks.ask({"run": name, "steps": WARM_UP_STEPS}, timeout=BUILD_TIMEOUT)
            self.losses[name] = answers[0]["losses"]

    def _measure(self, names: Sequence[str], rate: str, *, share: float, seconds: float) -> None:
        self._network.set_rate(None if rate == UNSHAPED else rate)
        most = math.inf if self._chosen.rounds is None else max(1, round(self._chosen.rounds * share))
        least = min(most, math.ceil(MINIMUM_ROUNDS * share))
        start = time.monotonic()
        durations: list[float] = []
        # As many rounds as fit, but enough for a median.
        while len(durations) < least or (
            len(durations) < most and time.monotonic() - start + max(durations) <= seconds
        ):
            begun = time.monotonic()
            for name in self._order.sample(names, len(names)):
                self._run_once(name, rate, round=len(durations))
            durations.append(time.monotonic() - begun)
        about = f"{names[0]}, " if len(names) == 1 else ""
        took = time.monotonic() - start
        print(f"{about}{rate}: {len(durations)} rounds in {took:.0f} s", flush=True)

    def _run_once(self, name: str, rate: str, *, round: int) -> None:
        """Run one step of a strategy and read the interfaces' counters."""
        before = self._network.sent_bytes()
        answers = self._ranks.ask({"run": name, "steps": 1}, timeout=STEP_TIMEOUT)
        after = self._network.sent_bytes()
        nodes = len(before)
        reported = [answer["sent_bytes"] for answer in answers]
        self.losses[name] += answers[0]["losses"]
        self.samples.append(
            Sample(
                strategy=name,
                rate=rate,
                round=round,
                seconds=max(answer["seconds"][0] for answer in answers),
                issued=max(answer["issued"][0] for answer in answers),
                tx_bytes=(sum(after) - sum(before)) / nodes,
                reported_bytes=None if None in reported else sum(reported) / nodes,
                loss=self.losses[name][-1],
            )
        )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument(
        "--rates", default="100mbit,250mbit,1gbit", help="of each link, per direction, or unshaped"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: ranks share one GPU")
    parser.add_argument("--mps", choices=["auto", "off"], default="auto", help="of the ranks that share it")
    parser.add_argument("--strategies", help="comma-separated; default: all that differ on this cluster")
    parser.add_argument("--seconds-per-rate", type=float, default=45.0, help="runs at least three rounds")
    parser.add_argument("--rounds", type=int, help="at each rate; default: as many as fit")
    parser.add_argument(
        "--separately", action="store_true", help="build one strategy at a time, for large models"
    )
    parser.add_argument(
        "--links", choices=["auto", "send"], default="auto", help="send: limit send() instead of links"
    )
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, help="tokens; default: 128, or 1,024 on a GPU")
    parser.add_argument("--micro-batch", type=int, help="sequences of a rank; default: 1, or 4 on a GPU")
    parser.add_argument("--micro-batches", type=int, default=1, help="per optimizer step")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--clip", type=float, help="largest norm of all gradients; default: no clipping")
    parser.add_argument(
        "--deterministic", action="store_true", help="torch's algorithms; unwritten memory is NaN; slower"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of order, data and initial weights")
    parser.add_argument("--profile", default="", help="strategies to profile on rank 0, at the last rate")
    parser.add_argument("--traces", type=Path, help="folder for the traces of --profile")
    parser.add_argument("--json", type=Path, help="output file for machine, rows and ratios")
    chosen = parser.parse_args(arguments)
    if not 2 <= chosen.nodes <= 200 or chosen.ranks_per_node < 1:
        parser.error("--nodes must be 2 to 200 and --ranks-per-node at least 1")
    try:
        for rate in chosen.rates.split(","):
            if rate != UNSHAPED:
                rate_in_bits(rate)
    except ValueError as error:
        parser.error(str(error))
    if chosen.separately and chosen.profile:
        parser.error("--profile needs all strategies at once: leave out --separately")
    for name in ("sequence", "micro_batch", "micro_batches", "vocabulary", "hidden", "layers", "rounds"):
        if getattr(chosen, name) is not None and getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and return the exit code."""
    chosen = parse_arguments(arguments)
    is_gpu, reason = chosen.device == "cuda", reason_to_skip()
    limits = chosen.links == "send" or (is_gpu and reason is not None)
    if limits and not (why := reason_against_limit(chosen.ranks_per_node)):
        if reason is not None:
            print(f"no network namespaces here ({reason}): limits NCCL's sockets instead", flush=True)
        reason = None
    elif limits:
        reason = f"{reason or '--links send'}; {why}"
    if is_gpu and reason is None:
        import torch

        reason = None if torch.cuda.is_available() else "torch sees no GPU"
    if reason is not None:
        print(f"the emulated cluster cannot run here: {reason}", file=sys.stderr)
        return EXIT_IMPOSSIBLE
    from benchmarks.cluster_strategies import Cluster, Workload, strategies_for
    from benchmarks.cluster_studies import BUILDERS

    cluster = Cluster(nodes=chosen.nodes, ranks_per_node=chosen.ranks_per_node)
    transport = "nccl" if is_gpu else "gloo"
    strategies = strategies_for(cluster, micro_batches=chosen.micro_batches, transport=transport)
    strategies = chosen.strategies.split(",") if chosen.strategies else strategies
    unknown = [name for name in strategies if name not in BUILDERS]
    profiled = chosen.profile.split(",") if chosen.profile else []
    unknown += [name for name in profiled if name not in strategies]
    if unknown:
        print(f"unknown strategies {', '.join(unknown)}: use {', '.join(BUILDERS)}", file=sys.stderr)
        return EXIT_IMPOSSIBLE
    workload = Workload(
        hidden=chosen.hidden,
        heads=max(1, chosen.hidden // 64),
        layers=chosen.layers,
        vocabulary=chosen.vocabulary,
        sequence_length=chosen.sequence or (1024 if is_gpu else 128),
        micro_batch=chosen.micro_batch or (4 if is_gpu else 1),
        micro_batches=chosen.micro_batches,
        clip=chosen.clip,
        seed=chosen.seed,
    )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def result_of(measurement: Measurement, profiles: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the result so far, and write it."""
        found = cluster_report.summarize(
            measurement.samples,
            cluster=cluster,
            parameters=measurement.parameters,
            arguments=arguments,
            device=chosen.device,
            sharing=sharing,
        )
        found |= {"workload": asdict(workload), "losses": measurement.losses, "profiles": profiles, **more}
        if chosen.json:
            write_atomically(chosen.json, json.dumps(found, indent=1) + "\n")
        return found

    try:
        with (
            tempfile.TemporaryDirectory(prefix="sdp4bit-cluster-") as folder,
            # Before the network, which ends the ranks: the service must outlive them.
            multi_process_service(chosen.mps) if is_gpu else nullcontext((False, "")) as (_, sharing),
            LimitedSenders(chosen.nodes) if limits else Network(chosen.nodes) as network,
        ):
            log = Path(folder) / "ranks.log"
            ranks = Ranks(network, ranks_per_node=chosen.ranks_per_node, log=log, device=chosen.device)
            build = {"workload": asdict(workload), **asdict(cluster), "deterministic": chosen.deterministic}
            measurement = Measurement(network, ranks, build=build, chosen=chosen)
            for _ in measurement.run(strategies):
                result_of(measurement, [], complete=False)
            profiles = [profile(ranks, name, traces=chosen.traces) for name in profiled]
            for each in profiles:
                each["rate"] = chosen.rates.split(",")[-1]
    except NetworkError as failure:
        print(f"the emulated cluster failed: {failure}", file=sys.stderr)
        return 1
    cluster_report.print_tables(result_of(measurement, profiles))
    return 0


def profile(ranks: Ranks, name: str, *, traces: Path | None) -> dict[str, Any]:
    """Return where the time of a step of rank 0 goes, and keep its trace unless it is too large."""
    steps, path = PROFILED_STEPS, None
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        steps, path = TRACED_STEPS, (traces / f"{name}.json.gz").resolve()
    command = {"profile": name, "steps": steps, "trace": path and str(path)}
    found = ranks.ask(command, timeout=PROFILED_STEPS * STEP_TIMEOUT)[0]
    if path is not None and (size := path.stat().st_size) > MOST_TRACE_BYTES:
        print(f"the trace of {name} has {size:,} bytes: it is not kept", flush=True)
        path.unlink()
    return {"strategy": name, **found}


if __name__ == "__main__":
    sys.exit(main())
