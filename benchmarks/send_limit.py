"""Limit the sockets of NCCL, without network namespaces: one process per node, over `lo`.

A library that is loaded before the C library (benchmarks/send_limit.c) replaces `send`, with which NCCL sends
over sockets. It takes the rate from a file that the processes have mapped, and counts the bytes there. gloo
sends by other calls, so barriers are neither limited nor counted.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster_network import NetworkError, rate_in_bits

_SOURCE = Path(__file__).with_suffix(".c")
_RATE, _SENT = struct.Struct("d"), struct.Struct("Q")


def reason_against_limit(ranks_per_node: int) -> str | None:
    """Return why the limit does not work here, or None."""
    if ranks_per_node != 1:
        return "limiting send() instead needs one rank per node"
    return None if shutil.which("cc") else "limiting send() instead needs a C compiler, cc"


class LimitedSenders:
    """Nodes of one process each on this host's loopback; has the methods of `cluster_network.Network`."""

    interface = "lo"

    def __init__(self, nodes: int) -> None:
        self.nodes = [f"n{node}" for node in range(nodes)]
        self._folder = tempfile.TemporaryDirectory(prefix="sdp4bit-send-")
        self._library = Path(self._folder.name) / "send_limit.so"
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> LimitedSenders:
        """Compile the library; NetworkError with the compiler's message."""
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", self._library, _SOURCE, "-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NetworkError(f"cc {_SOURCE.name}: {done.stderr.strip()}")
        for node in self.nodes:
            self._file(node).write_bytes(_RATE.pack(0.0) + _SENT.pack(0))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _file(self, node: str) -> Path:
        return Path(self._folder.name) / node

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def set_rate(self, rate: str | None) -> None:
        """Limit every node to this rate; None removes the limit."""
        for node in self.nodes:
            with self._file(node).open("r+b") as file:
                file.write(_RATE.pack(0.0 if rate is None else rate_in_bits(rate)))

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each node has sent so far, without headers."""
        return [_SENT.unpack_from(self._file(node).read_bytes(), _RATE.size)[0] for node in self.nodes]

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a node's only process in a separate session."""
        limited = {"LD_PRELOAD": str(self._library), "SEND_LIMIT": str(self._file(self.nodes[node]))}
        environment = {**options.pop("env", os.environ), **limited}
        process = subprocess.Popen(list(command), env=environment, start_new_session=True, **options)
        self._processes.append(process)
        return process
