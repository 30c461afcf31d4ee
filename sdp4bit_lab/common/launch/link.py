"""Two nodes on this machine, joined by a link whose rate can be set: network namespaces, which need root.

A process keeps each namespace. It ends with this one, and the kernel then removes namespaces and link.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from sdp4bit_lab.common.settings import RunError, require

INTERFACE = "eth0"
_PROGRAMS = ("ip", "nsenter", "tc", "unshare")
_BURST, _QUEUE = 1 << 17, 1 << 20
"""Bytes. Below one 64 KiB packet, the token bucket splits packets and misses its rate."""
_SETTING = """
ip addr add {address}/24 dev eth0 && ip link set lo up && ip link set eth0 up &&
echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle
"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Two nodes, as the processes that keep their namespaces."""

    keepers: tuple[int, ...]

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> None:
        """Move the calling thread to a node."""
        _set_namespace(f"/proc/{self.keepers[node]}/ns/net")

    @contextmanager
    def on_first_node(self) -> Iterator[None]:
        """Run the block on the first node, where children start and sockets are opened."""
        with open("/proc/thread-self/ns/net") as own:
            self.enter(0)
            try:
                yield
            finally:
                _set_namespace(f"/proc/self/fd/{own.fileno()}")


def _set_namespace(path: str) -> None:
    # os.setns needs Python 3.12.
    with open(path) as namespace:
        require(ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0, f"cannot enter the namespace {path}")


def reason_against_link() -> str:
    """Return why this process cannot create a link; "" if it may try."""
    if not os.path.exists("/proc/self/ns/net") or os.geteuid() != 0:
        return "a shaped link needs Linux and root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"a shaped link needs {', '.join(missing)}" if missing else ""


@contextmanager
def linked_nodes() -> Iterator[Link]:
    """Create a link for the block; RunError if the kernel refuses."""
    with ExitStack() as stack:
        keepers = []
        for _ in range(2):
            keeper = stack.enter_context(
                subprocess.Popen(
                    ["unshare", "--net", "sh", "-c", "echo; exec cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
            assert keeper.stdout is not None
            require(keeper.stdout.readline() == b"\n", "the kernel refuses a network namespace")
            keepers.append(keeper.pid)
        first, second = map(str, keepers)
        peer = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
        _run("nsenter", "--net", "--target", first, "ip", "link", "add", INTERFACE, *peer)
        for node, keeper_id in enumerate((first, second)):
            setting = _SETTING.format(address=Link.address(node))
            _run("nsenter", "--net", "--target", keeper_id, "sh", "-c", setting)
        yield Link(keepers=tuple(keepers))


def set_rate(megabits: int) -> None:
    """Limit the rate at which the calling thread's node sends over the link."""
    bucket = ("rate", f"{megabits}mbit", "burst", str(_BURST), "limit", str(_BURST + _QUEUE))
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
