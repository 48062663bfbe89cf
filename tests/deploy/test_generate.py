from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from click.testing import CliRunner

from kvrelay.deploy.cli import main
from kvrelay.deploy.commands.generate_output import PlainText
from kvrelay.v1 import inference_pb2 as pb

from .conftest import Kvrelay
from .scripted_service import COMPLETE, DELTAS, ScriptedService


def test_the_text_alone_goes_to_standard_output(kvrelay: Kvrelay):
    result = kvrelay("generate", "The capital of France is")
    assert (result.exit_code, result.stdout, result.stderr) == (0, " Paris, naïvely.\n", "")


def test_json_is_one_object_a_line(kvrelay: Kvrelay):
    result = kvrelay("generate", "x", "--json", "--request-id", "mine")
    first, second, last = map(json.loads, result.stdout.splitlines())
    assert first == {
        "event": "delta",
        "request_id": "mine",
        "choice": 0,
        "index": 0,
        "token_ids": [260],
        "text": " Paris",
    }
    assert (second["index"], second["token_ids"]) == (1, [30, 1])
    assert last == {
        "event": "complete",
        "request_id": "mine",
        "finish_reason": "stop",
        "matched_stop": "\n",
        "choices": [{"finish_reason": "stop", "matched_stop": "\n"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0},
        "timings": {
            "queue_seconds": 0.5,
            "prefill_seconds": 0.25,
            "transfer_seconds": 0.125,
            "decode_seconds": 2.0,
        },
        "seed": 2**63,
    }


def test_a_matched_token_zero_is_not_no_match(kvrelay: Kvrelay, service: ScriptedService):
    service.events = [pb.GenerateComplete(matched_token_id=0)]
    assert json.loads(kvrelay("generate", "x", "--json").stdout)["matched_stop"] == 0


def test_what_is_not_given_is_not_sent(kvrelay: Kvrelay, service: ScriptedService):
    kvrelay("generate", "x")
    [request] = service.requests
    assert request == pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams())
    assert request.sampling_params.ListFields() == []


def test_every_option_is_sent_zero_included(kvrelay: Kvrelay, service: ScriptedService):
    options = {
        "--max-tokens": 7,
        "--min-tokens": 0,
        "--temperature": 0,
        "--top-p": 0.5,
        "--top-k": -1,
        "--min-p": 0.25,
        "--frequency-penalty": -1.5,
        "--presence-penalty": 1.5,
        "--repetition-penalty": 1.25,
        "--seed": 2**64 - 1,
        "--top-logprobs": 3,
        "--prompt-logprobs": 0,
        "--n": 2,
    }
    arguments = [str(part) for option in options.items() for part in option]
    kvrelay(
        "generate", "x", "--stop", "a", "--stop", "b", "--ignore-eos", "--no-speculate", *arguments
    )
    assert service.requests[0].sampling_params == pb.SamplingParams(
        max_tokens=7,
        min_tokens=0,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.25,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        seed=2**64 - 1,
        stop=["a", "b"],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=0,
        n=2,
        speculate=False,
    )


SEVERAL = [
    pb.GenerateDelta(index=0, token_ids=[1], text=" Paris", choice=1),
    pb.GenerateDelta(index=0, token_ids=[2], text="The", choice=0),
    pb.GenerateDelta(index=1, token_ids=[3], text=", say", choice=1),
    pb.GenerateDelta(index=1, token_ids=[4], text=" city", choice=0),
]
STOP, ABORT = pb.FINISH_REASON_STOP, pb.FINISH_REASON_ABORT


def test_several_choices_are_printed_one_after_the_other(
    kvrelay: Kvrelay, service: ScriptedService
):
    ends = [pb.ChoiceEnd(finish_reason=STOP, matched_token_id=0), pb.ChoiceEnd(finish_reason=STOP)]
    service.events = [*SEVERAL, pb.GenerateComplete(finish_reason=STOP, choices=ends)]
    result = kvrelay("generate", "x", "--n", "2")
    assert result.exit_code == 0
    assert result.stdout == "[0] The city\n[1] Paris, say\n"
    lines = [json.loads(line) for line in kvrelay("generate", "x", "--json").stdout.splitlines()]
    assert [line["choice"] for line in lines[:-1]] == [1, 0, 1, 0]
    assert lines[-1]["choices"] == [
        {"finish_reason": "stop", "matched_stop": 0},
        {"finish_reason": "stop", "matched_stop": None},
    ]


def test_a_choice_that_was_aborted_is_said(kvrelay: Kvrelay, service: ScriptedService):
    ends = [pb.ChoiceEnd(finish_reason=STOP), pb.ChoiceEnd(finish_reason=ABORT)]
    service.events = [
        *SEVERAL,
        pb.GenerateComplete(finish_reason=STOP, choices=ends),
    ]
    result = kvrelay("generate", "x", "--n", "2", "--request-id", "mine")
    assert result.exit_code == 1
    assert result.stdout == "[0] The city\n[1] Paris, say\n"
    assert result.stderr == "kvrelay: request mine was aborted\n"


def test_the_prompts_logprobs_come_first(kvrelay: Kvrelay, service: ScriptedService):
    prompt = [pb.TokenLogprobs(token_id=7, logprob=-2), pb.TokenLogprobs(token_id=8, logprob=-3)]
    own = [pb.TokenLogprobs(token_id=260, logprob=-0.5)]
    first = pb.GenerateDelta(token_ids=[260], text="a", logprobs=own, prompt_logprobs=prompt)
    service.events = [first, COMPLETE]
    result = kvrelay("generate", "x", "--prompt-logprobs", "0", "--logprobs")
    assert result.stdout == "a\n"
    assert [line.split() for line in result.stderr.splitlines()] == [
        ["prompt", "1", "token", "7", "-2.0000"],
        ["prompt", "2", "token", "8", "-3.0000"],
        ["0", "token", "260", "-0.5000"],
    ]
    delta = json.loads(kvrelay("generate", "x", "--json").stdout.splitlines()[0])
    assert [entry["token_id"] for entry in delta["prompt_logprobs"]] == [7, 8]


def test_a_timeout_ends_the_call_here_and_there(kvrelay: Kvrelay, service: ScriptedService):
    service.hang, service.events = True, service.events[:1]
    result = kvrelay("generate", "x", "--timeout", "0.3")
    assert result.exit_code == 1
    assert result.stdout == " Paris\n"
    assert "DEADLINE_EXCEEDED" in result.stderr
    assert service.cancelled.wait(60)


def test_a_prompts_logprobs_are_numbered_over_several_deltas(
    kvrelay: Kvrelay, service: ScriptedService
):
    scores = [[pb.TokenLogprobs(token_id=token, logprob=-1)] for token in (7, 8)]
    service.events = [*(pb.GenerateDelta(prompt_logprobs=one) for one in scores), COMPLETE]
    lines = kvrelay("generate", "x").stderr.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["prompt", "1", "token", "7"],
        ["prompt", "2", "token", "8"],
    ]


def test_logprobs_alone_means_those_of_the_chosen_tokens(
    kvrelay: Kvrelay, service: ScriptedService
):
    kvrelay("generate", "--logprobs", "x")
    assert service.requests[0].text == "x"  # not the number of likeliest tokens
    params = service.requests[0].sampling_params
    assert params.HasField("logprobs")
    assert params.logprobs == 0


def test_logprobs_stand_beside_the_text(kvrelay: Kvrelay, service: ScriptedService):
    top = [pb.TokenLogprob(token_id=260, logprob=-0.5), pb.TokenLogprob(token_id=9, logprob=-1)]
    logprobs = [pb.TokenLogprobs(token_id=260, logprob=-0.5, top=top)]
    service.events = [
        pb.GenerateDelta(token_ids=[1, 2, 3, 4]),
        pb.GenerateDelta(index=4, token_ids=[260], text=" Paris", logprobs=logprobs),
        COMPLETE,
    ]
    result = kvrelay("generate", "x", "--top-logprobs", "2")
    assert result.stdout == " Paris\n"
    assert result.stderr.split() == ["4", "token", "260", "-0.5000", "260:-0.5000", "9:-1.0000"]
    delta = json.loads(kvrelay("generate", "x", "--json").stdout.splitlines()[1])
    assert delta["logprobs"] == [
        {
            "token_id": 260,
            "logprob": -0.5,
            "top": [{"token_id": 260, "logprob": -0.5}, {"token_id": 9, "logprob": -1.0}],
        }
    ]


def test_a_dash_reads_the_prompt_from_standard_input(kvrelay: Kvrelay, service: ScriptedService):
    kvrelay("generate", "-", stdin="two\nlines\n")
    assert service.requests[0].text == "two\nlines\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seed", "-1"),
        ("--seed", str(2**64)),
        ("--max-tokens", "-1"),
        ("--top-k", str(2**31)),
        ("--top-logprobs", "-1"),
        ("--prompt-logprobs", "-1"),
        ("--n", "-1"),
    ],
)
def test_a_number_that_cannot_be_sent_names_its_option(kvrelay: Kvrelay, option: str, value: str):
    result = kvrelay("generate", "x", option, value)
    assert result.exit_code == 2
    assert f"Invalid value for {option}" in result.stderr


def test_a_status_is_one_clear_line(kvrelay: Kvrelay, service: ScriptedService, server: str):
    service.events = ()
    service.failure = (grpc.StatusCode.INVALID_ARGUMENT, "top_p: must be in (0, 1], got 2")
    result = kvrelay("generate", "x")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"kvrelay: {server}: INVALID_ARGUMENT: top_p: must be in (0, 1], got 2\n"
    )


def test_what_came_before_a_failure_is_shown(kvrelay: Kvrelay, service: ScriptedService):
    service.events = DELTAS
    service.failure = (grpc.StatusCode.UNAVAILABLE, "a worker was lost")
    result = kvrelay("generate", "x")
    assert result.exit_code == 1
    assert result.stdout == " Paris, naïvely.\n"
    assert "UNAVAILABLE: a worker was lost" in result.stderr


def test_a_stream_without_completion_is_a_failure(kvrelay: Kvrelay, service: ScriptedService):
    service.events = DELTAS
    result = kvrelay("generate", "x")
    assert result.exit_code == 1
    assert "ended without a completion" in result.stderr


def test_an_aborted_request_is_said(kvrelay: Kvrelay, service: ScriptedService):
    service.events = [DELTAS[0], pb.GenerateComplete(finish_reason=pb.FINISH_REASON_ABORT)]
    result = kvrelay("generate", "x", "--request-id", "mine")
    assert result.exit_code == 1
    assert result.stderr == "kvrelay: request mine was aborted\n"


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where no server is, nor can be meanwhile."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def test_a_server_that_is_not_there_is_one_clear_line(nobody: str):
    result = CliRunner().invoke(main, ["generate", "x", "--server", nobody])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"kvrelay: {nobody}: UNAVAILABLE: ")
    assert len(result.stderr.splitlines()) == 1


def test_one_of_several_servers_is_enough(kvrelay: Kvrelay, nobody: str):
    for _ in range(3):
        result = kvrelay("generate", "x", "--server", nobody)
        assert (result.exit_code, result.stdout) == (0, " Paris, naïvely.\n")


def test_a_local_server_is_not_sought_through_the_web_proxy(
    kvrelay: Kvrelay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    assert kvrelay("generate", "x").exit_code == 0


def test_a_signal_in_a_destructor_aborts_the_request(
    kvrelay: Kvrelay, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
):
    """What a handler raises there is lost; as it is in gRPC's callbacks."""

    class Interrupting:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PlainText, "delta", lambda *_: [Interrupting()].clear())
    service.events, service.hang = DELTAS[:1], True
    result = kvrelay("generate", "x")
    assert (result.exit_code, result.stderr) == (130, "aborted\n")
    assert service.cancelled.wait(60)


def test_ctrl_c_aborts_the_request(service: ScriptedService, server: str):
    service.events, service.hang = DELTAS[:1], True
    command = [sys.executable, "-m", "kvrelay.deploy", "generate", "x", "--server", server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(len(" Paris")) == b" Paris"  # at once, not at the end
        process.send_signal(signal.SIGINT)
        assert service.cancelled.wait(60)
        assert process.wait(60) == 130
        assert process.stderr.read() == b"aborted\n"
