"""Which submissions a worker accepts, whoever sends them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvrelay.engine.scheduler.commands import Inbox, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.request import Request
from kvrelay.engine.worker.submit_rules import SubmitRules, submit_command
from kvrelay.engine.worker.worker_service import WorkerService
from kvrelay.v1 import inference_pb2, worker_pb2
from kvrelay.wire.messages import ATTACH_REQUEST
from kvrelay.wire.output import EndReason
from kvrelay.wire.submit import SubmitRequest
from kvrelay.wire.worker_info import WorkerRole
from tests.known import known

LINK = RouterLink.__new__(RouterLink)
LINK.router = "router"


def rules(role: WorkerRole) -> SubmitRules:
    return SubmitRules(role, vocab_size=100, eos_token_ids=(2,))


def submitted(message: worker_pb2.SubmitRequest, role: WorkerRole) -> Submit:
    """The command of a submission, as a worker of the role receives it."""
    received = ATTACH_REQUEST.from_message(worker_pb2.AttachRequest(submit=message)).command
    assert isinstance(received, SubmitRequest)
    return submit_command(received, LINK, rules(role))


def message(**changes: Any) -> worker_pb2.SubmitRequest:
    params = {
        "temperature": 0,
        "top_p": 1,
        "repetition_penalty": 1,
        "max_tokens": 5,
        "seed": 1,
        "n": 1,
        **changes.pop("params", {}),
    }
    fields: dict[str, Any] = {
        "request_id": "a",
        "attempt": 1,
        "input_ids": [1, 2, 3],
        "num_prompt_tokens": 3,
    }
    fields |= changes
    return worker_pb2.SubmitRequest(
        sampling_params=inference_pb2.SamplingParams(**params), **fields
    )


PEER = worker_pb2.PeerWorker(address="127.0.0.1:1", incarnation="p")


@pytest.mark.parametrize(
    ("field", "role", "changes"),
    [
        ("input_ids", WorkerRole.PREFILL, {"input_ids": []}),
        ("input_ids", WorkerRole.PREFILL, {"input_ids": [100]}),
        ("max_tokens", WorkerRole.PREFILL, {"params": {"max_tokens": 0}}),
        ("stop_token_ids", WorkerRole.PREFILL, {"params": {"stop_token_ids": [100]}}),
        ("logit_bias", WorkerRole.PREFILL, {"params": {"logit_bias": {100: 1.0}}}),
        ("top_p", WorkerRole.PREFILL, {"params": {"top_p": float("nan")}}),
        ("n", WorkerRole.PREFILL, {"params": {"n": 0}}),
        ("structured_output", WorkerRole.PREFILL, {"params": {"structured_output": {}}}),
        ("thinking_token_budget", WorkerRole.DECODE, {"params": {"thinking_token_budget": 1}}),
        ("reasoning", WorkerRole.DECODE, {"params": {"reasoning": {"begun": True}}}),
        ("n", WorkerRole.PREFILL, {"params": {"n": 2}, "num_prompt_tokens": 2}),
        ("num_prompt_tokens", WorkerRole.PREFILL, {"num_prompt_tokens": 0}),
        ("num_prompt_tokens", WorkerRole.PREFILL, {"num_prompt_tokens": 4}),
        (
            "num_prompt_tokens",
            WorkerRole.PREFILL,
            {"num_prompt_tokens": 1, "params": {"max_tokens": 2}},
        ),
        ("prefill", WorkerRole.PREFILL, {"prefill": PEER}),
    ],
)
def test_bad_submission_names_its_field(field, role, changes):
    with pytest.raises(ValueError, match=rf"^{field}"):
        submitted(message(**changes), role)


def test_a_decode_worker_computes_what_names_no_prefill_worker():
    assert submitted(message(), WorkerRole.DECODE).submission.prefill is None
    assert submitted(message(prefill=PEER), WorkerRole.DECODE).submission.prefill is not None


def test_end_of_sequence_stops_unless_ignored():
    submit = submitted(message(params={"stop_token_ids": [7]}), WorkerRole.PREFILL)
    assert submit.submission.sampling_params.stops.stop_token_ids == {2, 7}
    ignoring = message(params={"stop_token_ids": [7], "ignore_eos": True}, prefill=PEER)
    submit = submitted(ignoring, WorkerRole.DECODE)
    assert submit.submission.sampling_params.stops.stop_token_ids == {7}
    assert known(submit.submission.prefill).incarnation == "p"


def test_what_was_emitted_before_is_output():
    resumed = message(num_prompt_tokens=1, first_choice=2, age_seconds=5)
    submit = submitted(resumed, WorkerRole.PREFILL)
    request = Request.of(submit)
    assert (request.prompt_ids, request.output_ids, request.input_len) == ((1,), [2, 3], 3)
    assert (submit.key.choice, submit.submission.choices) == (2, (2,))
    assert submit.arrived <= time.monotonic() - 5


def test_a_refusal_names_a_choice_that_was_asked_for():
    """A router takes no notice of others: the request would wait for ever."""
    link, service = RouterLink("router"), WorkerService("w", Inbox(), rules(WorkerRole.PREFILL))
    refused = message(input_ids=[100], num_prompt_tokens=1, first_choice=2)
    service.take(worker_pb2.AttachRequest(submit=refused), link)
    ((output,),) = [known(outputs).outputs for outputs in link.take_all()]
    assert known(output.end).reason is EndReason.FAILED
    assert (output.key.attempt, output.key.choice) == (1, 2)
