"""The client for threads, with routers that say what a test wants."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from kvrelay.client import Access, CallFailed, Client, Diverged, make_request
from kvrelay.net.tls import CurrentTls, TlsFiles
from kvrelay.v1 import inference_pb2 as pb
from tests.certificates import Authority

from .scripted import COMPLETE, WHOLE, WORDS, Script, ScriptedRouter, deltas, serving, unavailable

TEXT = "".join(WORDS)
TOKENS = list(range(100, 100 + len(WORDS)))


def test_an_answer_is_collected() -> None:
    router = ScriptedRouter()
    with serving(router) as servers, Client(servers) as client:
        answer = client.answer("x", max_tokens=8, temperature=0.5, cache_salt="s", top_k=None)
    assert (answer.text, answer.token_ids) == (TEXT, TOKENS)
    assert answer.complete == COMPLETE
    [request] = router.requests
    assert (request.text, request.cache_salt, len(request.request_id)) == ("x", "s", 32)
    assert answer.request_id == request.request_id
    assert request.sampling_params == pb.SamplingParams(max_tokens=8, temperature=0.5)


def test_a_broken_stream_goes_on_at_another_router_where_it_broke() -> None:
    first = ScriptedRouter([unavailable(*deltas(0, 3), retry_after_ms=60_000)])
    with serving(first) as one, Client(one) as client:
        stream = client.generate("x", timeout_seconds=60)
        with pytest.raises(CallFailed, match="gone"):
            list(stream)
    first = ScriptedRouter([unavailable(*deltas(0, 3))])
    second = ScriptedRouter([Script([*deltas(size=2), COMPLETE])])
    with serving(first, second) as servers, Client(servers) as client:
        client._balancer.begin(second.address)  # so that the first one is called first
        events = list(client.generate("x", request_id="mine"))
    assert [event.delta.index for event in events[:-1]] == [0, 1, 2, 3, 4, 6]
    assert "".join(event.delta.text for event in events) == TEXT
    assert [token for event in events for token in event.delta.token_ids] == TOKENS
    assert events[-1].complete == COMPLETE
    assert first.requests == second.requests
    assert first.requests[0].request_id == "mine"


def test_a_stream_that_ends_without_a_completion_is_a_broken_one() -> None:
    router = ScriptedRouter([Script(deltas(0, 5)), WHOLE])
    with serving(router) as servers, Client(servers) as client:
        assert client.answer("x").text == TEXT
    assert len(router.requests) == 2


def test_an_overloaded_router_is_asked_again_when_it_says() -> None:
    full = Script((), grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_ms=300)
    router = ScriptedRouter([full, full, WHOLE])
    with serving(router) as servers, Client(servers) as client:
        begun = time.monotonic()
        assert client.answer("x").text == TEXT
        assert time.monotonic() - begun >= 0.6


def test_a_router_that_is_not_there_is_passed_over() -> None:
    with serving(ScriptedRouter()) as gone:
        pass
    with serving(ScriptedRouter()) as servers, Client([*gone, *servers]) as client:
        for _ in range(4):
            assert client.answer("x").text == TEXT


def test_other_tokens_of_a_retry_are_an_error() -> None:
    other = pb.GenerateDelta(token_ids=[5], text="A")
    router = ScriptedRouter([unavailable(*deltas(0, 3)), Script([other, COMPLETE])])
    with serving(router) as servers, Client(servers) as client, pytest.raises(Diverged):
        client.answer("x")


def test_a_bad_request_is_not_tried_again() -> None:
    bad = Script((), grpc.StatusCode.INVALID_ARGUMENT, "top_p: must be in (0, 1], got 2")
    router = ScriptedRouter([bad])
    with serving(router) as servers, Client(servers) as client:
        with pytest.raises(CallFailed, match=r"INVALID_ARGUMENT: top_p") as caught:
            client.answer("x", top_p=2)
        assert caught.value.server == router.address
        assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert len(router.requests) == 1


def test_without_retries_the_request_is_sent_as_it_is() -> None:
    router = ScriptedRouter([unavailable()])
    with (
        serving(router) as servers,
        Client(servers, retry_seconds=0) as client,
        pytest.raises(CallFailed, match="gone"),
    ):
        client.answer("x")
    assert router.requests == [pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams())]


def test_a_deadline_is_the_calls_too() -> None:
    router = ScriptedRouter([Script(deltas(0, 1), hangs=True)])
    with serving(router) as servers, Client(servers) as client:
        with pytest.raises(CallFailed) as caught:
            client.answer("x", timeout_seconds=1.5)
        assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert router.cancelled.wait(60)


def test_a_stream_that_is_left_ends_its_call() -> None:
    router = ScriptedRouter([Script(deltas(0, 2), hangs=True)])
    with serving(router) as servers, Client(servers) as client:
        with client.generate("x") as stream:
            assert next(stream).delta.text == WORDS[0]
        assert router.cancelled.wait(60)
        assert list(stream) == []


def test_a_signal_handler_may_cancel_a_stream_whatever_it_does() -> None:
    """It waits for an event, or to be allowed to try again."""
    for script in (Script(deltas(0, 1), hangs=True), unavailable(retry_after_ms=20_000)):
        router = ScriptedRouter([script])
        with serving(router) as servers, Client(servers) as client:
            stream = client.generate("x")
            before = signal.signal(signal.SIGALRM, lambda *_, stream=stream: stream.cancel())
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with pytest.raises(CallFailed) as caught:
                    list(stream)
            finally:
                signal.signal(signal.SIGALRM, before)
            assert caught.value.status is grpc.StatusCode.CANCELLED
            router.cancelled.set()


def test_other_calls_are_tried_again_elsewhere() -> None:
    broken, good = ScriptedRouter([unavailable(retry_after_ms=60_000)]), ScriptedRouter([Script()])
    with serving(broken, good) as servers, Client(servers) as client:
        for _ in range(3):
            info = client.call("GetModelInfo", pb.GetModelInfoRequest(), timeout_seconds=60)
            assert info.model == good.address


def test_other_calls_tell_that_a_router_is_well() -> None:
    router = ScriptedRouter(
        [unavailable(retry_after_ms=1), unavailable(retry_after_ms=1), Script()]
    )
    with serving(router) as servers, Client(servers) as client:
        client.call("GetModelInfo", pb.GetModelInfoRequest(), timeout_seconds=60)
        assert client._balancer._routers[router.address].failures == 0


@pytest.mark.parametrize("script", [unavailable(retry_after_ms=20_000), Script(hangs=True)])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.answer("x"),
        lambda client: client.call("GetModelInfo", pb.GetModelInfoRequest()),
    ],
)
def test_closing_ends_calls_whatever_they_wait_for(
    call: Callable[[Client], object], script: Script
) -> None:
    router = ScriptedRouter([script])
    with serving(router) as servers, ThreadPoolExecutor(1) as pool:
        client = Client(servers)
        ended = pool.submit(call, client)
        assert router.called.wait(60)
        time.sleep(0.2)  # for the retry's wait to begin
        client.close()
        for attempt in (ended.result, partial(call, client), partial(client.abort, "x")):
            with pytest.raises(CallFailed) as caught:
                attempt()
            assert caught.value.status is grpc.StatusCode.CANCELLED
        assert client._balancer._routers[router.address].calls == 0


def test_a_request_is_aborted_wherever_it_is() -> None:
    routers = [ScriptedRouter() for _ in range(3)]
    with serving(*routers) as servers, Client(servers) as client:
        assert client.abort(servers[1])
        assert not client.abort("unknown")
    assert [len(router.aborts) for router in routers] == [2, 2, 1]
    with serving(ScriptedRouter()) as gone:
        pass
    with Client(gone) as client, pytest.raises(CallFailed, match="UNAVAILABLE"):
        client.abort("x", timeout_seconds=60)


def test_threads_share_a_client() -> None:
    router, other = ScriptedRouter(), ScriptedRouter()
    texts: list[str] = []
    with serving(router, other) as servers, Client(servers) as client:
        threads = [
            threading.Thread(target=lambda: texts.append(client.answer("x").text)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [TEXT] * 8
    assert len(router.requests) + len(other.requests) == 8


def test_a_token_goes_by_tls_or_to_this_machine(tmp_path: Path) -> None:
    router = ScriptedRouter()
    with serving(router) as servers, Client(servers, Access(token="secret")) as client:
        client.answer("x")
    assert router.authorizations == ["Bearer secret"]
    with pytest.raises(ValueError, match=r"example.com:50051: the token .* plain text"):
        Client(["example.com:50051"], Access(token="secret"))
    Client(["example.com:50051"], Access(token="secret", tls=True)).close()
    with pytest.raises(OSError, match="nowhere"):
        Client(["example.com:50051"], Access(ca=tmp_path / "nowhere"))
    assert "secret" not in repr(Access(token="secret"))


def test_tls_is_checked_against_the_authority(tmp_path: Path) -> None:
    files = Authority(tmp_path / "tls").issue()
    stranger = Authority(tmp_path / "other").ca
    credentials = CurrentTls(TlsFiles(files.cert, files.key)).server_credentials()
    router = ScriptedRouter()
    with serving(router, credentials=credentials) as servers:
        with Client(servers, Access(ca=files.ca, token="secret")) as client:
            assert client.answer("x").text == TEXT
        for access in (Access(), Access(tls=True), Access(ca=stranger)):
            with (
                Client(servers, access, retry_seconds=0) as client,
                pytest.raises(CallFailed, match="UNAVAILABLE"),
            ):
                client.answer("x")
    assert router.authorizations == ["Bearer secret"]


def test_fields_that_are_none_of_a_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="max_token"):
        make_request("x", max_token=3)
    with pytest.raises(ValueError, match="given as a whole"):
        make_request(pb.GenerateRequest(text="x"), max_tokens=3)
    assert list(make_request([1, 2]).input_ids.ids) == [1, 2]
