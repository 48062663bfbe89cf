"""What a worker lets in, whoever sends it."""

from __future__ import annotations

import time

import pytest

from kvrelay.engine.commands import Inbox
from kvrelay.engine.config import Role
from kvrelay.engine.outputs import EndReason, RouterLink
from kvrelay.engine.request import Request
from kvrelay.engine.service import WorkerService
from kvrelay.engine.wire import SubmitRules, submit_from_wire
from kvrelay.v1 import inference_pb2, worker_pb2

LINK = RouterLink.__new__(RouterLink)
LINK.router = "router"


def rules(role: Role) -> SubmitRules:
    return SubmitRules(role, vocab_size=100, eos_token_ids=(2,))


def message(**changes) -> worker_pb2.SubmitRequest:
    params = {
        "temperature": 0,
        "top_p": 1,
        "repetition_penalty": 1,
        "max_tokens": 5,
        "seed": 1,
        "n": 1,
        **changes.pop("params", {}),
    }
    fields = {"request_id": "a", "attempt": 1, "input_ids": [1, 2, 3], "num_prompt_tokens": 3}
    fields |= changes
    return worker_pb2.SubmitRequest(
        sampling_params=inference_pb2.SamplingParams(**params), **fields
    )


PEER = worker_pb2.PeerWorker(address="127.0.0.1:1", incarnation="p")


@pytest.mark.parametrize(
    ("field", "role", "changes"),
    [
        ("input_ids", Role.PREFILL, {"input_ids": []}),
        ("input_ids", Role.PREFILL, {"input_ids": [100]}),
        ("max_tokens", Role.PREFILL, {"params": {"max_tokens": 0}}),
        ("stop_token_ids", Role.PREFILL, {"params": {"stop_token_ids": [100]}}),
        ("logit_bias", Role.PREFILL, {"params": {"logit_bias": {100: 1.0}}}),
        ("top_p", Role.PREFILL, {"params": {"top_p": float("nan")}}),
        ("n", Role.PREFILL, {"params": {"n": 0}}),
        ("n", Role.PREFILL, {"params": {"n": 2}, "num_prompt_tokens": 2}),
        ("num_prompt_tokens", Role.PREFILL, {"num_prompt_tokens": 0}),
        ("num_prompt_tokens", Role.PREFILL, {"num_prompt_tokens": 4}),
        ("num_prompt_tokens", Role.PREFILL, {"num_prompt_tokens": 1, "params": {"max_tokens": 2}}),
        ("prefill", Role.DECODE, {}),
        ("prefill", Role.PREFILL, {"prefill": PEER}),
    ],
)
def test_bad_submission_names_its_field(field, role, changes):
    with pytest.raises(ValueError, match=rf"^{field}"):
        submit_from_wire(message(**changes), LINK, rules(role))


def test_end_of_sequence_stops_unless_ignored():
    submit = submit_from_wire(message(params={"stop_token_ids": [7]}), LINK, rules(Role.PREFILL))
    assert submit.stops.stop_token_ids == {2, 7}
    ignoring = message(params={"stop_token_ids": [7], "ignore_eos": True}, prefill=PEER)
    submit = submit_from_wire(ignoring, LINK, rules(Role.DECODE))
    assert submit.stops.stop_token_ids == {7}
    assert submit.prefill.incarnation == "p"


def test_what_was_emitted_before_is_output():
    resumed = message(num_prompt_tokens=1, first_choice=2, age_seconds=5)
    submit = submit_from_wire(resumed, LINK, rules(Role.PREFILL))
    request = Request.of(submit)
    assert (request.prompt_ids, request.output_ids, request.input_len) == ((1,), [2, 3], 3)
    assert (submit.key.choice, submit.choices) == (2, (2,))
    assert submit.arrived <= time.monotonic() - 5


def test_a_refusal_names_a_choice_that_was_asked_for():
    """A router takes no notice of others: the request would wait for ever."""
    link, service = RouterLink("router"), WorkerService("w", Inbox(), rules(Role.PREFILL))
    refused = message(input_ids=[100], num_prompt_tokens=1, first_choice=2)
    service._take(worker_pb2.AttachRequest(submit=refused), link)
    (output,) = link._queue.get_nowait().outputs
    assert output.end.reason is EndReason.FAILED
    assert (output.key.attempt, output.key.choice) == (1, 2)
