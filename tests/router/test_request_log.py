"""What the router logs of a request, and what it does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from tests.otlp_receiver import collecting

from .cluster import collect, running

NAME = "kvrelay.router.requests.live_requests"
PROMPT = "the marker in the prompt"


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    yield
    logging.getLogger(NAME).setLevel(logging.NOTSET)


async def ended(
    config: RouterConfig, caplog: pytest.LogCaptureFixture, request_id: str = "r-1"
) -> list[Any]:
    """The messages of one request."""
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        request = pb.GenerateRequest(request_id=request_id, text=PROMPT)
        request.sampling_params.max_tokens = 4
        streamed = await collect(cluster.stub.Generate(request))
        assert len(streamed.token_ids) == 4
    return [record for record in caplog.records if record.name == NAME]


async def test_a_request_is_a_line_without_its_text(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (record,) = await ended(config, caplog)
    assert (record.levelno, record.request_id, record.outcome) == (logging.INFO, "r-1", "length")
    assert record.getMessage().startswith("request 'r-1' ended: length, ")
    assert not hasattr(record, "prompt")
    assert "marker" not in caplog.text


async def test_there_is_none_at_the_usual_level(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert not await ended(config, caplog)


async def test_prompts_are_logged_where_that_is_asked_for(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with caplog.at_level(logging.DEBUG):  # the handler takes all
        logging.getLogger().setLevel(logging.WARNING)
        (record,) = await ended(replace(config, log_prompts=True), caplog)
    assert record.prompt == PROMPT
    (output,) = record.output
    assert output
    assert PROMPT in record.getMessage()


async def test_a_request_id_makes_no_line_of_its_own(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (record,) = await ended(config, caplog, "r-1\nWARNING forged")
    assert len(record.getMessage().splitlines()) == 1


async def test_prompts_of_a_router_do_not_turn_on_anothers_lines(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        logging.getLogger().setLevel(logging.WARNING)
        assert await ended(replace(config, log_prompts=True), caplog)
        caplog.clear()
        assert not await ended(config, caplog)


async def test_a_traced_request_names_its_trace(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with collecting() as collector:
        config = replace(config, otlp=collector.endpoint, trace_sample=1.0)
        (record,) = await ended(config, caplog)
    assert {record.trace_id} == {one.span.trace_id.hex() for one in collector.spans}
