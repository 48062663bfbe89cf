"""What a process that a forward has killed leaves to the next one, and what any other leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.engine.worker.black_box import BlackBox, posthumous_ends
from kvrelay.wire.output import FailureReason
from kvrelay.wire.submit import RequestKey

LIFE = """
import os, signal, sys
from pathlib import Path
from kvrelay.engine.worker.black_box import BlackBox
from kvrelay.wire.submit import RequestKey

box = BlackBox(Path(sys.argv[1]))
box.begin([RequestKey("r", "earlier", 1), RequestKey("r", "other", 2)])
box.end()
if sys.argv[3] == "computing":
    box.begin([RequestKey("r", "mine", 7), RequestKey("s", "other/name", 8, 3)])
os.kill(os.getpid(), int(sys.argv[2]))
"""
MINE, OTHER = RequestKey("r", "mine", 7), RequestKey("s", "other/name", 8, 3)


def live_and_die(path: Path, number: signal.Signals, phase: str) -> None:
    command = [sys.executable, "-c", LIFE, str(path), str(int(number)), phase]
    process = subprocess.run(command, capture_output=True, check=False)
    assert process.returncode == -number, process.stderr


@pytest.mark.slow  # the crash on demand is such a forward
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_forward_that_killed_its_process_is_known_to_the_next_one(
    tmp_path: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "worker.step"
    live_and_die(path, number, "computing")
    box = BlackBox(path)
    assert box.killed == (MINE, OTHER)
    assert "the process before this one died:\nFatal Python error: " in caplog.text
    box.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGSEGV, "idle"), (signal.SIGKILL, "computing"), (signal.SIGTERM, "computing")],
)
def test_any_other_end_accuses_nobody(tmp_path: Path, number: signal.Signals, phase: str):
    path = tmp_path / "worker.step"
    live_and_die(path, number, phase)
    box = BlackBox(path)
    assert box.killed == ()
    box.close()


CRASH = """
import sys, threading
from pathlib import Path
from types import SimpleNamespace
from kvrelay.engine.faults import FaultPlan, parse_faults
from kvrelay.engine.worker.black_box import BlackBox, RecordingExecutor
from kvrelay.engine.worker.faulty import FaultyExecutor
from kvrelay.wire.submit import RequestKey

class Executor:
    def launch(self, step):
        pass

faulty = FaultyExecutor(Executor(), FaultPlan(parse_faults("crash:forward")))
executor = RecordingExecutor(faulty, BlackBox(Path(sys.argv[1])))
request = SimpleNamespace(key=RequestKey("r", "mine", 7))
step = SimpleNamespace(scheduled=[SimpleNamespace(request=request, is_live=True)])
forward = threading.Thread(target=executor.launch, args=[step])
forward.start()
forward.join()
"""


def test_a_crash_on_demand_is_one_of_the_thread_that_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Else the forward may end, and its record with it, before the process does."""
    path = tmp_path / "worker.step"
    command = [sys.executable, "-c", CRASH, str(path)]
    process = subprocess.run(command, capture_output=True, check=False)
    assert process.returncode == -signal.SIGSEGV, process.stderr
    box = BlackBox(path)
    assert box.killed == (MINE,)
    _, _, crashed = caplog.text.partition("Current thread")
    assert " in launch" in crashed.partition("\n\n")[0]
    later = BlackBox(path)
    assert later.killed == (), "a death is told once"
    box.close()
    later.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("computes", [False, True])
def test_a_process_without_a_fatal_signal_leaves_a_record_that_accuses_nobody(
    tmp_path: Path, computes: bool
):
    """SIGKILL leaves the files as they were at that moment."""
    path = tmp_path / "worker.step"
    ended = BlackBox(path)
    ended.begin([MINE])
    if not computes:
        ended.end()
        path.with_suffix(".signal").write_text("Fatal Python error: Segmentation fault\n")
    box = BlackBox(path)
    assert box.killed == ()
    box.close()
    ended.close()


@pytest.mark.slow
def test_a_death_is_told_once(tmp_path: Path):
    path = tmp_path / "worker.step"
    live_and_die(path, signal.SIGSEGV, "computing")
    live_and_die(path, signal.SIGKILL, "idle")
    box = BlackBox(path)
    assert box.killed == ()
    box.close()


def test_who_was_alone_is_said():
    causes = [[one.end.cause for one in posthumous_ends(keys) if one.end] for keys in KEYS]
    assert causes == [[FailureReason.FORWARD_FAILED_ALONE], [FailureReason.FORWARD_FAILED] * 2]


KEYS = [(MINE,), (MINE, OTHER)]
