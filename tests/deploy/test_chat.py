"""`kvrelay chat` in a terminal and piped, with a server that says what it is told."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.deploy.reach.http_target import HttpTarget

from .terminal import Terminal


class ChatServer(ThreadingHTTPServer):
    """Answers a message with its words in turn; one that says "long" has no end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.left = threading.Event()
        """A client has left in mid-answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/sessions":  # OpenAI's servers have none
            self.send_error(404)
            return
        self.server.bodies.append(body)
        self.server.authorizations.append(self.headers["authorization"])
        message = body["messages"][-1]["content"]
        if "refuse" in message:
            self.send_error(400, "too long")
            return
        self._begin("text/event-stream")
        self._say(reasoning_content="(hm) ")
        if "fail" in message:
            self.wfile.write(b'data: {"error": {"message": "out of memory"}}\n\n')
            return
        for word in message.split():
            self._say(content=f"{word.upper()} ")
        if "long" in message:
            self.rfile.read(1)  # nothing, once the client has left
            self.server.left.set()
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()

    def _say(self, **delta: str) -> None:
        chunk = {"choices": [{"index": 0, "delta": delta}]}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat(server: ChatServer, *arguments: str, stdin: str) -> Result:
    return CliRunner().invoke(main, ["chat", "--url", server.url, *arguments], input=stdin)


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_each_message_brings_those_before_it(server: ChatServer):
    result = chat(server, "--system", "Be brief.", "--seed", "7", stdin="one two\n\nthree")
    assert result.exit_code == 0, result.output
    assert result.stdout == "(hm) ONE TWO \n(hm) THREE \n"
    first, second = server.bodies
    assert first == {
        "model": "tiny",
        "messages": [said("system", "Be brief."), said("user", "one two")],
        "stream": True,
        "seed": 7,
    }
    assert second["messages"][2:] == [said("assistant", "ONE TWO "), said("user", "three")]


def test_a_refusal_ends_what_is_piped_in(server: ChatServer):
    result = chat(server, stdin="please refuse\nnever\n")
    assert result.exit_code == 1
    assert result.stderr.count("HTTP_400") == 1
    assert len(server.bodies) == 1


def test_an_error_in_mid_answer_is_shown(server: ChatServer):
    result = chat(server, stdin="fail")
    assert result.exit_code == 1
    assert "out of memory" in result.stderr


def test_in_a_terminal_ctrl_c_stops_the_answer_and_again_ends(server: ChatServer):
    terminal = Terminal(["chat", "--url", f"{server.url}/v1/"], TERM="xterm")
    try:
        terminal.read_until(lambda: terminal.text.startswith(">"))
        terminal.type("very long\n")
        terminal.read_until(lambda: "VERY LONG" in terminal.text)
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(lambda: "(stopped)\n>" in terminal.text)
        assert server.left.wait(60)
        terminal.type("refuse\n")
        terminal.read_until(lambda: "HTTP_400" in terminal.text)
        terminal.type("hi\n")
        terminal.read_until(lambda: "HI\n>" in terminal.text)
        # What came before the stop is kept, and what was refused is not.
        assert server.bodies[-1]["messages"] == [
            said("user", "very long"),
            said("assistant", "VERY LONG "),
            said("user", "hi"),
        ]
        assert terminal.interrupt() == 0
    finally:
        terminal.close()


def test_the_token_goes_with_each_message(server: ChatServer, tmp_path):
    path = tmp_path / "token"
    path.write_text("secret-secret-secret\n")
    assert chat(server, "--token-file", str(path), stdin="hi").exit_code == 0
    assert server.authorizations == ["Bearer secret-secret-secret"]
    elsewhere = ["chat", "--url", "http://example.invalid", "--token-file", str(path)]
    result = CliRunner().invoke(main, elsewhere, input="hi")
    assert (result.exit_code, "plain text" in result.stderr) == (1, True)


def test_a_server_that_is_not_there_is_said(server: ChatServer):
    result = CliRunner().invoke(main, ["chat", "--url", "http://127.0.0.1:9"], input="hi")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: http://127.0.0.1:9: ")


def test_a_server_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvrelay.deploy.commands.chat._START_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(main, ["chat", "--url", url], input="hi")
    assert (result.exit_code, result.stderr) == (1, f"kvrelay: {url}: no answer\n")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://host/v1/", "https://host"),
        ("http://host/prefix/v1", "http://host/prefix"),
    ],
)
def test_urls(text: str, url: str):
    assert str(HttpTarget.parse(text)) == url


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "ftp://host", "http://", "http://a:b@host"])
def test_what_is_no_url(text: str):
    with pytest.raises(ValueError, match=r"give host|no URL"):
        HttpTarget.parse(text)
