"""The hosts are apart, and every tool that harms them does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.hosts.commands import CommandError, ip
from tests.hosts.host import Host
from tests.hosts.lan import Lan, lan
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [
    pytest.mark.alone,  # NIXL agents of other tests would take up these interfaces
    pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS),
]
MOMENT_S = 0.5
"""Long for a packet, short for a test."""
SOON_S = 60.0
PORT = 7000
_ECHO = f"""
import socket
served = socket.create_server(("", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    connection, _ = served.accept()
    while data := connection.recv(65536):
        connection.sendall(data)
"""
_HEALTH = """
import sys
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2_grpc
server = grpc.server(futures.ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
print(server.add_insecure_port(sys.argv[1]), flush=True)
server.start()
server.wait_for_termination()
"""
_ASK = f"""
import socket, sys
to = sys.argv[1]
with socket.create_connection((to, {PORT}), timeout=float(sys.argv[2])) as one:
    one.sendall(b"ping")
    assert one.recv(4) == b"ping"
"""
_DATAGRAMS = f"""
import socket
box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
box.bind(("", {PORT}))
while True:
    print(box.recv(100).decode(), flush=True)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Lan]:
    with lan(["a", "b", "c", "to-kill"], temp_bytes=8 << 20) as network:
        yield network


@pytest.fixture(scope="module")
def a(network: Lan) -> Host:
    return network.hosts["a"]


@pytest.fixture(scope="module")
def b(network: Lan) -> Host:
    host = network.hosts["b"]
    host.spawn(sys.executable, "-c", _ECHO)
    until(lambda: answers(network.hosts["a"], "b"))
    return host


def answers(asker: Host, asked: str, seconds: float = MOMENT_S) -> bool:
    """Whether a host takes a connection and sends back what it gets."""
    try:
        asker.run(sys.executable, "-c", _ASK, asked, str(seconds))
    except CommandError:
        return False
    return True


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_hosts_reach_each_other_by_name_and_both_kinds_of_address(a: Host, b: Host):
    assert answers(a, "b", SOON_S)
    assert answers(a, b.addresses.ipv4, SOON_S)
    assert answers(a, b.addresses.ipv6, SOON_S)


@pytest.mark.slow
def test_this_machine_reaches_a_hosts_grpc_service(b: Host):
    address = f"{b.address}:7001"
    b.spawn(sys.executable, "-c", _HEALTH, address)
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        told = stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=SOON_S)
    assert told.status == health_pb2.HealthCheckResponse.SERVING


def test_a_host_has_its_own_name_processes_memory_and_disk(network: Lan, a: Host, b: Host):
    assert a.run("hostname") == "a\n"
    assert a.run("sh", "-c", "echo $$ >/tmp/mine; echo 1 >/dev/shm/mine; ls /proc/1/exe")
    for folder in ("/tmp", "/dev/shm"):
        assert "mine" in a.run("ls", folder)
        assert "mine" not in b.run("ls", folder)
    seen = a.run(sys.executable, "-c", "import psutil; print(*psutil.pids())").split()
    assert "1" in seen
    assert str(os.getpid()) not in seen
    (network.shared / "file").write_text("for all")
    assert b.run("cat", str(network.shared / "file")) == "for all"


def test_a_cut_loses_one_way_alone_and_heals(network: Lan, a: Host, b: Host):
    box = a.spawn(sys.executable, "-c", _DATAGRAMS, stdout=subprocess.PIPE, text=True)
    network.cut(a, b)
    assert not answers(a, "b")
    assert not answers(a, b.addresses.ipv6)
    assert answers(network.hosts["c"], "b", SOON_S), "only this pair is apart"
    assert box.stdout is not None
    with futures.ThreadPoolExecutor() as pool:
        line = pool.submit(box.stdout.readline)

        def datagram_comes() -> bool:
            """It is lost if the box is not open yet."""
            send = f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hi', ('a', {PORT}))"
            b.run(sys.executable, "-c", f"import socket; {send}")
            return line.done()

        until(datagram_comes)
        assert line.result() == "hi\n", "the other way is open"
    network.heal(a, b)
    until(lambda: answers(a, "b"))


@pytest.mark.slow
def test_a_connection_outlives_a_short_cut(network: Lan, a: Host, b: Host):
    program = f"""
import socket
one = socket.create_connection(("b", {PORT}))
for line in iter(input, "end"):
    one.sendall(b"x")
    print(one.recv(1), flush=True)
"""
    talk = a.spawn(
        *(sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert talk.stdin is not None
    assert talk.stdout is not None
    with talk.stdin as ask, talk.stdout as said, futures.ThreadPoolExecutor() as pool:
        ask.write("go\n")
        ask.flush()
        assert _reads_line(said)
        network.cut_both_ways(a, b)
        ask.write("go\n")
        ask.flush()
        answer = pool.submit(said.readline)
        with pytest.raises(futures.TimeoutError):
            answer.result(MOMENT_S)
        network.heal_both_ways(a, b)
        assert answer.result(SOON_S)


@pytest.mark.slow
def test_a_link_that_is_down_and_up_again(network: Lan, a: Host, b: Host):
    network.unplug(b)
    assert not answers(a, "b")
    network.plug(b)
    until(lambda: answers(a, "b"))


@pytest.mark.slow
def test_a_slow_link_is_slow_one_way_alone(network: Lan, a: Host, b: Host):
    """A megabyte takes at least a second at 8 Mbit/s, however slow this machine is."""
    network.slow(a, "8mbit", receives=False)
    program = f"""
import socket, sys, threading, time
one = socket.create_connection((sys.argv[1], {PORT}))
begun = time.monotonic()
threading.Thread(target=one.sendall, args=[bytes(1 << 20)]).start()
left = 1 << 20
while left:
    left -= len(one.recv(left))
print(time.monotonic() - begun)
"""
    assert float(a.run(sys.executable, "-c", program, "b")) > 0.9
    assert "tbf" in a.run("tc", "qdisc", "show", "dev", "eth0")
    network.speed_up(a)
    assert "tbf" not in a.run("tc", "qdisc", "show", "dev", "eth0")


@pytest.mark.slow
def test_a_paused_host_does_nothing_until_it_wakes(a: Host, b: Host):
    b.pause()
    assert {process.status() for process in b.processes()} == {psutil.STATUS_STOPPED}
    assert not answers(a, "b"), "its kernel takes the connection, nobody answers"
    b.wake()
    until(lambda: answers(a, "b"))


@pytest.mark.slow
def test_a_killed_host_leaves_no_process_even_if_it_was_paused(network: Lan, a: Host):
    host = network.hosts["to-kill"]
    host.spawn(sys.executable, "-c", _ECHO)
    until(lambda: answers(a, host.name))
    host.pause()
    processes = host.processes()
    assert len(processes) > 1
    host.kill()
    assert not any(process.is_running() for process in processes)
    assert not host.is_up
    assert not answers(a, host.name)


@pytest.mark.slow
def test_a_full_disk(a: Host, b: Host):
    a.fill_disk()
    with pytest.raises(CommandError, match="No space left"):
        a.run("sh", "-c", "cat /proc/version >/tmp/one-more")
    b.run("sh", "-c", "cat /proc/version >/tmp/one-more")
    a.free_disk()
    a.run("sh", "-c", "cat /proc/version >/tmp/one-more")


def test_networks_are_beside_each_other_and_nothing_of_them_is_left():
    before = _own_links()
    with lan(["a"]) as one, lan(["a"]) as other:
        hosts = [one.hosts["a"], other.hosts["a"]]
        assert hosts[0].address != hosts[1].address
        assert not answers(hosts[0], hosts[1].address)
        processes = [process for host in hosts for process in host.processes()]
    assert not any(process.is_running() for process in processes)
    assert _own_links() == before


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_test():
    program = """
from tests.hosts.lan import lan
with lan(["a"]) as network:
    print(network.hosts["a"].pid, flush=True)
    input()
"""
    tests = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert tests.stdin is not None
    assert tests.stdout is not None
    with tests.stdin, tests.stdout:
        host = psutil.Process(int(tests.stdout.readline()))
        tests.kill()
        tests.wait()
    host.wait(SOON_S)
    until(lambda: f"kv{tests.pid}-" not in ip("-o", "link"))


def _own_links() -> set[str]:
    return {line for line in ip("-o", "link").splitlines() if f"kv{os.getpid()}-" in line}


def _reads_line(stream) -> str:
    with futures.ThreadPoolExecutor() as pool:
        line: str = pool.submit(stream.readline).result(SOON_S)
        return line
