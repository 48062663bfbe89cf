"""Logs in JSON: one object a line."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest
from ray._private.worker import print_worker_logs

from kvrelay.deploy.commands.relayed_logs import as_json
from kvrelay.deploy.logs import JsonFormatter, TextFormatter, set_up_log, utc
from kvrelay.options.observing import LogFormat
from kvrelay.wire.submit import RequestKey

KEY = RequestKey("router", "r-1", 7)


def written(
    message: str, *args: object, level: int = logging.INFO, **fields: object
) -> dict[str, Any]:
    record = logging.LogRecord("kvrelay.x", level, __file__, 1, message, args, None)
    vars(record).update(fields)
    line = JsonFormatter({"worker": "decode-0", "incarnation": "decode-0-a"}).format(record)
    assert "\n" not in line
    said: dict[str, Any] = json.loads(line)
    return said


def test_a_file_gets_no_colours_from_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")
    monkeypatch.delenv("RAY_COLOR_PREFIX")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    set_up_log(logging.WARNING, LogFormat.TEXT)
    said = io.StringIO()
    batch = {"ip": "127.0.0.1", "pid": 7, "is_err": True, "lines": ["hello"], "job": None}
    print_worker_logs({**batch, "actor_name": "prefill-0", "task_name": None}, said)
    assert "hello" in said.getvalue()
    assert "\x1b" not in said.getvalue()


def test_a_message_says_who_and_what() -> None:
    said = written("request %s: %s", "r-1", "two\nlines", level=logging.WARNING, **KEY.fields)
    assert said.pop("time").endswith("Z")
    assert said.pop("pid")
    assert said == {
        "level": "WARNING",
        "logger": "kvrelay.x",
        "message": "request r-1: two\nlines",
        "worker": "decode-0",
        "incarnation": "decode-0-a",
        "request_id": "r-1",
        "attempt": 7,
    }


def test_a_text_line_is_one_line_whatever_a_client_has_sent() -> None:
    key = RequestKey("router", "r\nERROR kvrelay: all is lost\x1b[31m\u2028", 7)
    record = logging.LogRecord("kvrelay.x", logging.INFO, __file__, 1, "%s\tbroke", (key,), None)
    line = TextFormatter().format(record)
    assert line.splitlines() == [line]
    assert line == ("INFO kvrelay.x: r\\nERROR kvrelay: all is lost\\x1b[31m\\u2028#7\tbroke")


def test_what_is_not_known_is_left_out() -> None:
    assert "trace_id" not in written("m", trace_id=None)
    assert written("m", trace_id="0a")["trace_id"] == "0a"


def test_a_traceback_is_in_the_same_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "m", (), sys.exc_info())
    said = json.loads(JsonFormatter({}).format(record))
    assert "ValueError: broken" in said["exception"]


def test_time_is_utc_to_the_millisecond() -> None:
    assert utc(1_700_000_000.0625) == "2023-11-14T22:13:20.062Z"


def test_a_workers_line_is_relayed_as_it_is_if_it_is_json() -> None:
    line = json.dumps({"level": "INFO", "message": "m"})
    assert as_json(line, {"actor_name": "decode-0", "pid": 7}) == line


def test_another_line_becomes_json() -> None:
    for line in ("a library's warning", "{not json"):
        said = json.loads(as_json(line, {"actor_name": "decode-0", "pid": 7}))
        assert (said["message"], said["worker"], said["pid"]) == (line, "decode-0", 7)
        assert {"time", "level", "logger"} < said.keys()
