"""A cluster that outlives the command that has started it, and ends by another one."""

from __future__ import annotations

import contextlib
import re

import psutil
import pytest

from tests.hosts.conftest import ThreeHosts
from tests.hosts.host import Host
from tests.hosts.ray_nodes import connected, kvrelay, serving

pytestmark = [pytest.mark.alone, pytest.mark.slow]
PROMPT = list(range(5, 105))
ROLES = ("PrefillWorker", "DecodeWorker")


def ended_well(host: Host, *words: str) -> str:
    """What a command on a host says, which must end well."""
    done = kvrelay(host, *words)
    assert done.returncode == 0, done
    return done.stdout + done.stderr


def workers_on(hosts: dict[str, Host]) -> list[str]:
    """The titles of the workers' processes: Ray puts an actor's class into it."""
    titles = []
    for process in (one for host in hosts.values() for one in host.processes()):
        with contextlib.suppress(psutil.Error):  # it has ended
            titles.append(" ".join(process.cmdline()))
    return [one for one in titles if any(role in one for role in ROLES)]


@pytest.mark.parametrize("command", [("serve", "--detach"), ("up",)], ids=" ".join)
async def test_it_runs_on_until_it_is_told_to_end(
    command: tuple[str, ...], three_hosts: ThreeHosts
):
    hosts = three_hosts.network.hosts
    head, ray = hosts["head"], ("--ray-address", three_hosts.ray.address)
    model = ("--model", str(three_hosts.model), "--dtype", "float32")
    workers = [*model, *ray, "--kv-memory", "4MiB", "--audit-pages", "--insecure"]
    workers += ["--prefill-on", "rack=p", "--decode-on", "rack=d", "--metrics", "127.0.0.1:0"]
    said = ended_well(head, *command, *workers)
    try:
        found = re.search(r"controller (\S+)\n", said)
        assert found, said
        assert len(workers_on(hosts)) == 2
        assert "Ready in" in ended_well(head, "up", *workers), "again: it is there"

        anywhere = f"{head.address}:0"
        routing = [*model, "--controller", found[1], "--insecure"]
        routing += ["--grpc", anywhere, "--http", anywhere, "--metrics", anywhere]
        with serving(head, *routing, command="router") as process:
            cluster = await connected(process)
            answer = await cluster.generate(PROMPT, max_tokens=16, temperature=0, ignore_eos=True)
            assert len(answer.tokens) == 16
            await cluster.assert_at_baseline()
        assert "decode-0     live" in ended_well(head, "status", *ray)
    finally:
        assert ended_well(head, "down", *ray) == "default has ended.\n"
    assert not workers_on(hosts)
