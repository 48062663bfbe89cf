"""What cannot be served is refused by the size of its bytes, before it is parsed."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.router.admission.served_tokenizer import MAX_TEXT_TOKENS
from kvrelay.router.doors.incoming_messages import MessageReader
from kvrelay.router.doors.raw_requests import PartBytes, measure_parts
from kvrelay.router.errors import InvalidField
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.v1 import inference_pb2 as pb

LIMITS = RequestLimits(402, max_model_len=100, prefill_pool_tokens=200, decode_pool_tokens=200)
READER = MessageReader(max_message_bytes=4 << 20, longest_token_bytes=1000)


def request(**fields: Any) -> bytes:
    params = pb.SamplingParams(stop=["x"], max_tokens=3)
    message = pb.GenerateRequest(request_id="r", priority=-1, sampling_params=params, **fields)
    return bytes(message.SerializeToString())


def test_the_parts_of_a_message() -> None:
    assert measure_parts(b"") == PartBytes(0, 0, 0)
    rest = len(request())
    text, ids = request(text="x" * 300), request(input_ids=pb.TokenIds(ids=[300] * 300))
    assert measure_parts(text) == PartBytes(300, 0, len(text) - 300)
    assert measure_parts(ids) == PartBytes(0, 603, len(ids) - 603)
    assert rest < measure_parts(ids).rest < rest + 5  # with the prompt's tag and length
    fixed = b"\x91\x0d" + bytes(8) + b"\x95\x0d" + bytes(4)  # fields of a later version
    assert measure_parts(text + fixed).text == 300


@pytest.mark.parametrize("raw", [b"\x12\x05abc", b"\xff", b"\x13", b"\x08\x00" * 65, b"\x80" * 11])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut off|wire type|fields|ten bytes"):
        measure_parts(raw)
    with pytest.raises(InvalidField, match="message: is no GenerateRequest"):
        READER.generate_request(raw, LIMITS)


def test_what_can_be_served_is_parsed() -> None:
    raw = request(text="x" * 99_000)
    assert READER.generate_request(raw, LIMITS).text == "x" * 99_000
    raw = request(input_ids=pb.TokenIds(ids=[7] * 99))
    assert list(READER.generate_request(raw, LIMITS).input_ids.ids) == [7] * 99


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        (
            {"text": "x" * 99_001},
            "text: This model's maximum context length is 100 tokens. The prompt has 100",
        ),
        (
            {"input_ids": pb.TokenIds(ids=[2**28] * 20_000)},
            "input_ids: This model's maximum context length is 100 tokens. The prompt has 16667",
        ),
        ({"request_id": "x" * (1 << 20)}, "sampling_params: the request has 10485"),
        ({"text": "x" * (4 << 20)}, "text: the message has 4194"),
        ({"input_ids": pb.TokenIds(ids=[1] * (4 << 20))}, "input_ids: the message has 4194"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_size(
    fields: dict[str, Any], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = bytes(pb.GenerateRequest(**fields).SerializeToString())
    monkeypatch.setattr(
        "kvrelay.router.doors.incoming_messages.pb", None
    )  # so that parsing would fail
    with pytest.raises(InvalidField) as caught:
        READER.generate_request(raw, LIMITS)
    assert str(caught.value).startswith(refusal)


def test_without_a_longest_token_a_text_is_refused_by_its_tokens_alone() -> None:
    reader = MessageReader(max_message_bytes=4 << 20, longest_token_bytes=None)
    assert reader.generate_request(request(text="x" * 200_000), LIMITS).text


def test_token_ids_to_detokenize_are_bounded() -> None:
    message = pb.DetokenizeRequest(input_ids=[300] * 100)
    assert READER.detokenize_request(bytes(message.SerializeToString())) == message
    for ids in ([1] * (MAX_TEXT_TOKENS + 1), [1] * (7 * MAX_TEXT_TOKENS)):
        raw = bytes(pb.DetokenizeRequest(input_ids=ids).SerializeToString())
        with pytest.raises(InvalidField, match=r"input_ids: has .* the router takes 524288"):
            READER.detokenize_request(raw)
    with pytest.raises(InvalidField, match="message: is no DetokenizeRequest"):
        READER.detokenize_request(b"\xff")
