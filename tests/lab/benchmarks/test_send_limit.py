"""The limit of send(): bytes are exact, and only large messages over TCP wait. No test measures a time.

Layer: child processes with the library, over loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster_network
from benchmarks.cluster_network import NetworkError
from benchmarks.send_limit import LimitedSenders, reason_against_limit
from tests import ROOT

REASON = reason_against_limit(1)
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BURST = 1 << 18
"""Bytes that a rate of up to 2 Gbit/s lets through at once, LEAST_BURST in benchmarks/send_limit.c."""
REFUSED = "refused by a socket that is writable"
TINY = "1kbit"
"""A message of the least size that waits would last 8 s, a part of 16 KiB 131 s."""

# Every line of the input is a Python expression, and every line of the output its value in JSON.
CHILD = """
import json, select, socket, sys, threading

def pair(family, kind):
    if family == socket.AF_UNIX:
        return socket.socketpair(family, kind)
    server = socket.socket(family, kind)
    server.bind(("127.0.0.1", 0))
    client = socket.socket(family, kind)
    if kind == socket.SOCK_STREAM:
        server.listen()
        client.connect(server.getsockname())
        return client, server.accept()[0]
    client.connect(server.getsockname())
    return client, server

tcp, other = pair(socket.AF_INET, socket.SOCK_STREAM)
tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)  # takes less than a burst at once
received = []

def receive():
    while data := other.recv(1 << 16):
        received.append(len(data))

reader = threading.Thread(target=receive, daemon=True)
reader.start()

def send(size, blocking=False, flags=0):
    tcp.setblocking(blocking)
    for _ in range(2):
        try:
            return tcp.send(bytes(size), flags)
        except BlockingIOError:
            assert select.select([], [tcp], [], 10)[1]
    return "refused by a socket that is writable"

def send_all(size):
    tcp.setblocking(True)
    tcp.sendall(bytes(size))
    return size

def elsewhere(family, kind, size):
    first, second = pair(family, kind)
    first.setblocking(False)
    return first.send(bytes(size)), len(second.recv(size))

def end():
    tcp.shutdown(socket.SHUT_WR)
    reader.join()
    return sum(received)

print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Child:
    """The only process of a node."""

    def __init__(self, senders: LimitedSenders, node: int) -> None:
        command = [sys.executable, "-c", CHILD]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = senders.start(node, command, **pipes)
        assert self._answer() == "ready"

    def ask(self, expression: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def senders() -> Iterator[LimitedSenders]:
    with LimitedSenders(2) as senders:
        yield senders


def fill_bucket(child: Child, senders: LimitedSenders) -> None:
    """Let the tokens of a burst gather at a high rate, then limit to a tiny one."""
    senders.set_rate("1gbit")
    child.ask("__import__('time').sleep(0.1)")
    child.ask("send(2048)")
    child.ask("__import__('time').sleep(0.1)")
    senders.set_rate(TINY)


@pytest.mark.gloo
@needs_compiler
def test_every_byte_over_tcp_is_counted_for_its_node(senders: LimitedSenders) -> None:
    children = [Child(senders, node) for node in range(2)]
    assert senders.sent_bytes() == [0, 0]
    sizes = (1, 1023, 1024, 100_003, 3_000_001)
    for rate in (None, "10gbit"):
        senders.set_rate(rate)
        before = senders.sent_bytes()
        for size in sizes:
            children[1].ask(f"send_all({size})")
        after = senders.sent_bytes()
        assert [new - old for new, old in zip(after, before, strict=True)] == [0, sum(sizes)]
    part = children[1].ask("send(1 << 24)")
    assert part < 1 << 24 and senders.sent_bytes()[1] == 2 * sum(sizes) + part
    assert children[1].ask("end()") == 2 * sum(sizes) + part
    assert senders.address(1) == "127.0.0.1"


@pytest.mark.gloo
@needs_compiler
def test_a_nonblocking_socket_gets_a_part_within_the_burst_and_then_none(senders: LimitedSenders) -> None:
    child = Child(senders, 0)
    fill_bucket(child, senders)
    before = senders.sent_bytes()[0]
    sent = child.ask("send(1 << 20)")
    assert 0 < sent < BURST
    # What does not fit into the socket's buffer is given back to the bucket.
    while isinstance(more := child.ask("send(1 << 20)"), int):
        sent += more
    assert more == REFUSED
    assert BURST - (1 << 14) < sent <= BURST
    assert child.ask("send(1 << 20, blocking=True, flags=socket.MSG_DONTWAIT)") == more
    assert senders.sent_bytes()[0] - before == sent
    senders.set_rate(None)
    assert isinstance(child.ask("send(1 << 20)"), int)


@pytest.mark.gloo
@needs_compiler
def test_a_blocking_socket_waits_and_its_message_arrives_complete(senders: LimitedSenders) -> None:
    child = Child(senders, 0)
    fill_bucket(child, senders)
    # Twice the burst: some of it waits.
    senders.set_rate("40mbit")
    assert child.ask(f"send_all({2 * BURST})") == 2 * BURST
    assert child.ask("end()") == 2048 + 2 * BURST


@pytest.mark.gloo
@needs_compiler
def test_datagrams_local_sockets_and_control_messages_pass(senders: LimitedSenders) -> None:
    child = Child(senders, 0)
    senders.set_rate(TINY)
    assert child.ask("send(1024)") == REFUSED
    for family, kind in (("UNIX", "STREAM"), ("UNIX", "DGRAM"), ("INET", "DGRAM")):
        assert child.ask(f"elsewhere(socket.AF_{family}, socket.SOCK_{kind}, 60_000)") == [60_000] * 2
    assert senders.sent_bytes() == [0, 0]
    assert [child.ask("send(1023)") for _ in range(50)] == [1023] * 50
    assert senders.sent_bytes() == [50 * 1023, 0]


@pytest.mark.gloo
@needs_compiler
def test_no_process_outlives_its_owner() -> None:
    """A rank that waits in a collective does not see that its input has ended."""
    program = """
import sys, time
from benchmarks.send_limit import LimitedSenders
with LimitedSenders(1) as senders:
    print(senders.start(0, ["nice", sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
    time.sleep(300)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    process = int(owner.stdout.readline())
    time.sleep(1)  # until the library is loaded
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 10
    while (status := cluster_network.process_status(process)) and status[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_reasons_against_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert reason_against_limit(2) == "limiting send() instead needs one rank per node"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason_against_limit(1) == "limiting send() instead needs a C compiler, cc"


@pytest.mark.gloo
def test_an_error_of_the_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(NetworkError, match=r"cc send_limit\.c: no headers"), LimitedSenders(1):
        pass
