"""Emulate nodes as network namespaces, each joined to a bridge by a shaped veth link.

Every node is a namespace with one uplink, `eth0`, whose peer is a port of a bridge in the switch's namespace.
Token buckets (tbf) at both ends of each link shape traffic in both directions. Ranks of one node communicate
over `lo`, which is neither shaped nor counted. Nothing outside the namespaces changes.

A watchdog process cleans up. It waits for its standard input to close, which happens when the network is
closed or its creator dies. Then it kills the processes in the namespaces and removes the namespaces. If the
watchdog is killed too, the next network removes the leftovers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PREFIX = "sdp4bit-"
UPLINK = "eth0"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-(switch|n\d+)")
_SUBNET = "10.77.0"
_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}

_MINIMUM_BURST = 128 * 1024
"""Below one 64 KiB offload packet, the token bucket splits packets in software and misses its rate."""
_MINIMUM_QUEUE = 1 << 20
_BURST_SECONDS, _QUEUE_SECONDS = 1e-3, 20e-3

# The arguments are namespaces. Retry, because a process that is starting may be missed at first.
_WATCHDOG = """
trap '' INT TERM HUP
cat > /dev/null
for attempt in 1 2 3 4 5; do
    running=$(for name in "$@"; do ip netns pids "$name" 2> /dev/null; done)
    [ -z "$running" ] && break
    kill -KILL $running 2> /dev/null
    sleep 0.1
done
for name in "$@"; do ip netns del "$name" 2> /dev/null; done
"""


class NetworkError(RuntimeError):
    """Report a failed command during network setup."""


def reason_to_skip() -> str | None:
    """Return why a network cannot be created here, or None."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "creating network namespaces needs root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    probe = f"{PREFIX}{_identity()}-switch"
    try:
        _run("ip", "netns", "add", probe)
        try:
            _run("ip", "-n", probe, "link", "add", UPLINK, "type", "veth", "peer", "name", "p0")
            _run("tc", "-n", probe, "qdisc", "add", "dev", UPLINK, "root", *_token_bucket(1e6))
            _run("ip", "-n", probe, "link", "add", "br0", "type", "bridge")
        finally:
            _run("ip", "netns", "del", probe)
    except NetworkError as failure:
        return f"the kernel refuses: {failure}"
    return None


def rate_in_bits(rate: str) -> float:
    """Convert a rate such as 250mbit to bits per second; ValueError if it is malformed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(gbit|mbit|kbit)", rate)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"invalid rate {rate!r}: use the form 250mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def remove_leftovers() -> list[str]:
    """Remove the namespaces of networks whose process has exited, and return their names."""
    left = []
    for line in _run("ip", "netns", "list").splitlines():
        match = _NAME.fullmatch(line.split(" ")[0])
        if match and _started(int(match[1])) != match[2]:
            left.append(match[0])
    if left:
        subprocess.run(["sh", "-c", _WATCHDOG, "sh", *left], stdin=subprocess.DEVNULL, check=False)
    return left


class Network:
    """Nodes joined by shaped links; a context manager that cleans up after itself."""

    interface = UPLINK

    def __init__(self, nodes: int) -> None:
        base = f"{PREFIX}{_identity()}"
        self._switch = f"{base}-switch"
        self.nodes = [f"{base}-n{node}" for node in range(nodes)]
        """Names of the nodes' namespaces."""
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        """Create the nodes and unshaped links; remove them if a command fails (NetworkError)."""
        remove_leftovers()
        # A separate session, so that Ctrl-C does not reach it before it has cleaned up.
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, "sh", self._switch, *self.nodes],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill and remove everything in the network; idempotent."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            assert watchdog.stdin is not None
            watchdog.stdin.close()
            watchdog.wait()

    def _create(self) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        bridge = ("br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        _run("ip", "-n", switch, "link", "add", *bridge)
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for index, node in enumerate(self.nodes):
            port = f"p{index}"
            _run("ip", "netns", "add", node)
            peer = ("type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", node, "link", "add", UPLINK, *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", node, "addr", "add", f"{self.address(index)}/24", "dev", UPLINK)
            for device in ("lo", UPLINK):
                _run("ip", "-n", node, "link", "set", device, "up")
            # Keep the congestion window during computation, and ignore metrics of earlier connections.
            for name, value in (
                ("tcp_congestion_control", "reno"),
                ("tcp_slow_start_after_idle", "0"),
                ("tcp_no_metrics_save", "1"),
            ):
                setting = f"echo {value} > /proc/sys/net/ipv4/{name}"
                _run("ip", "netns", "exec", node, "sh", "-c", setting)

    def address(self, node: int) -> str:
        return f"{_SUBNET}.{node + 1}"

    def set_rate(self, rate: str | None) -> None:
        """Limit every link to this rate in each direction; None removes the limit."""
        bits = None if rate is None else rate_in_bits(rate)
        ends = [(node, UPLINK) for node in self.nodes]
        ends += [(self._switch, f"p{index}") for index in range(len(self.nodes))]
        for namespace, device in ends:
            with suppress(NetworkError):  # there is none yet
                _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            if bits is not None:
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *_token_bucket(bits))

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each node has sent over its link so far, by the interface's counter."""
        counters = []
        for node in self.nodes:
            links = json.loads(_run("ip", "-n", node, "-j", "-s", "link", "show", UPLINK))
            counters.append(int(links[0]["stats64"]["tx"]["bytes"]))
        return counters

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a node in a separate session; close() kills it."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.nodes[node], *command], start_new_session=True, **options
        )


def _token_bucket(bits: float) -> list[str]:
    burst = int(max(_MINIMUM_BURST, bits / 8 * _BURST_SECONDS))
    limit = burst + int(max(_MINIMUM_QUEUE, bits / 8 * _QUEUE_SECONDS))
    return ["tbf", "rate", f"{int(bits)}bit", "burst", str(burst), "limit", str(limit)]


def _identity() -> str:
    """Return this process's id and start time, which together are unique."""
    return f"{os.getpid()}-{_started(os.getpid())}"


def process_status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str | None:
    status = process_status(pid)
    return status[19] if status else None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as failure:
        raise NetworkError(f"{command[0]}: {failure}") from failure
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
