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
