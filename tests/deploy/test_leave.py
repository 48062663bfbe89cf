"""How `kvrelay leave` ends the processes of workers."""

from __future__ import annotations

import io
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.deploy.commands.leave import _mark_of, drained
from kvrelay.deploy.nodes.node_workers import NodeWorker
from kvrelay.deploy.start_progress import StartProgress

DRAINS = "trap 'exit 71' TERM; echo ready; while :; do sleep 0.01; done"
ENDS_AT_SECOND = """
trap 'n=$((n + 1)); [ $n = 2 ] && exit 99' TERM; echo ready; while :; do sleep 0.01; done
"""
STAYS = "trap '' TERM; echo ready; while :; do sleep 0.01; done"


@contextmanager
def process(title: str, script: str) -> Iterator[subprocess.Popen[str]]:
    """A shell that Ray could have started; it is ready for SIGTERM."""
    words = [title, "-c", script]
    shell = subprocess.Popen(words, executable="/bin/sh", stdout=subprocess.PIPE, text=True)
    try:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        yield shell
    finally:
        shell.kill()
        shell.communicate()


async def left(*workers: NodeWorker, seconds: float) -> tuple[list[str], str]:
    said = io.StringIO()
    return await drained(list(workers), seconds, StartProgress(said)), said.getvalue()


async def test_workers_drain_and_their_ends_are_awaited():
    with process("ray::DecodeWorker", DRAINS) as one, process("ray::PrefillWorker", DRAINS) as two:
        workers = NodeWorker("decode-0", one.pid), NodeWorker("prefill-0", two.pid)
        names, said = await left(*workers, seconds=20)
        assert (one.wait(), two.wait()) == (71, 71)
    assert names == []
    assert sorted(said.splitlines()) == ["decode-0 has left.", "prefill-0 has left."]


async def test_a_worker_that_does_not_end_in_time_is_named():
    with process("ray::DecodeWorker", STAYS) as stays, process("ray::DecodeWorker", DRAINS) as ends:
        workers = NodeWorker("decode-0", stays.pid), NodeWorker("decode-1", ends.pid)
        names, said = await left(*workers, seconds=0.3)
        assert stays.poll() is None
    assert names == ["decode-0"]
    assert said == "decode-1 has left.\n"


async def test_a_second_call_lets_a_worker_that_drains_go_on():
    with process("ray::DecodeWorker", ENDS_AT_SECOND) as drains:
        worker = NodeWorker("decode-0", drains.pid)
        for _ in range(3):
            assert await left(worker, seconds=0.3) == (["decode-0"], "")
            assert drains.poll() is None
        drains.terminate()
        assert drains.wait(20) == 99, "the first call has sent the one before"


def let_disk_be_full_for(pid: int) -> None:
    with _mark_of(pid) as mark:
        Path(mark.name).unlink()
        Path(mark.name).symlink_to("/dev/full")


async def test_workers_drain_though_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file can be opened there, and nothing be written into it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with process("ray::DecodeWorker", DRAINS) as one, process("ray::PrefillWorker", DRAINS) as two:
        for shell in (one, two):
            let_disk_be_full_for(shell.pid)
        workers = NodeWorker("decode-0", one.pid), NodeWorker("prefill-0", two.pid)
        names, said = await left(*workers, seconds=20)
        assert (one.wait(), two.wait()) == (71, 71)
    assert names == []
    assert sorted(said.splitlines()) == ["decode-0 has left.", "prefill-0 has left."]


async def test_another_program_that_has_the_pid_now_is_left_alone():
    with process("somebody", DRAINS) as other:
        names, said = await left(NodeWorker("decode-0", other.pid), seconds=0.3)
        assert other.poll() is None
    assert (names, said) == ([], "")
    names, said = await left(NodeWorker("decode-0", other.pid), seconds=0.3)
    assert (names, said) == ([], ""), "the process had ended"


def link_mark_to(victim: Path, pid: int) -> None:
    """Put a link in the place of a process's mark, in a folder that everybody may write to."""
    with _mark_of(pid) as mark:
        link = Path(mark.name)
    link.unlink()
    link.symlink_to(victim)
    link.parent.chmod(0o777)


async def test_a_folder_that_another_user_has_made_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its links could lead anywhere. The worker drains all the same."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    victim.touch()
    with process("ray::DecodeWorker", DRAINS) as worker:
        link_mark_to(victim, worker.pid)
        names, _ = await left(NodeWorker("decode-0", worker.pid), seconds=20)
        assert worker.wait() == 71
    assert names == []
    assert victim.read_text() == ""
