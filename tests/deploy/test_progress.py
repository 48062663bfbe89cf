from __future__ import annotations

import io

import pytest

from kvrelay.deploy.start_progress import StartProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_line_a_step_with_its_seconds():
    stream = io.StringIO()
    with StartProgress(stream).step("model", "looking") as step:
        step.say("found")
    [line] = stream.getvalue().splitlines()
    assert line.split() == ["model", "found", "0.0", "s"]


def test_a_terminal_sees_the_step_while_it_runs():
    stream = Terminal()
    with StartProgress(stream).step("model", "looking"):
        assert "looking ..." in stream.getvalue()
    assert stream.getvalue().endswith("0.0 s\n")


def test_a_step_that_raises_says_that_it_is_not_done():
    stream = io.StringIO()
    with pytest.raises(KeyError), StartProgress(stream).step("ray", "starting"):
        raise KeyError
    assert "starting: not done" in stream.getvalue()


def test_two_steps_at_once_are_two_lines_and_a_terminal_still_shows_the_one_that_runs():
    stream = Terminal()
    progress = StartProgress(stream)
    with progress.step("model", "converting"):
        with progress.step("ray", "starting") as step:
            step.say("logs here")
        progress.line("a note")
    lines = [line.rpartition("\r\x1b[K")[2].split() for line in stream.getvalue().split("\n")[:-1]]
    assert [line[:2] for line in lines] == [["ray", "logs"], ["a", "note"], ["model", "converting"]]
    shown = [line.split("\r\x1b[K")[1] for line in stream.getvalue().split("\n")[:-1]]
    assert shown[1] == "  model     converting ...", "what runs is shown again below the first line"
