"""Messages parsed from clients' bytes, and refusals by size.

A refusal here is cheap: the message is neither parsed nor tokenized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvrelay.router.admission.served_tokenizer import MAX_TEXT_TOKENS
from kvrelay.router.doors.raw_requests import PartBytes, measure_parts
from kvrelay.router.errors import InvalidField
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.v1 import inference_pb2 as pb

_PARSED_ANYWAY_BYTES: Final = 64 << 10
_MAX_REST_BYTES: Final = 1 << 20
"""The most bytes of a request without its prompt; the largest valid one has a fifth of this."""
_MAX_ID_BYTES: Final = 6
"""The most bytes of a token id: a number of up to five, and a tag where it is not packed."""


@dataclass(frozen=True, slots=True)
class MessageReader:
    """A reader of clients' messages, with bounds.

    Args:
        max_message_bytes: the most bytes of one message.
        longest_token_bytes: the most bytes of text that one token stands for; None: no such bound.
    """

    max_message_bytes: int
    longest_token_bytes: int | None

    def generate_request(self, raw: bytes, limits: RequestLimits) -> pb.GenerateRequest:
        """Parse a GenerateRequest.

        Raises:
            InvalidField: it is too large to be served, or it is no such message.
        """
        try:
            self._check_parts(measure_parts(raw), len(raw), limits)
            message = pb.GenerateRequest()
            message.ParseFromString(raw)
        except (ValueError, DecodeError) as error:
            raise InvalidField("message", f"is no GenerateRequest: {error}") from error
        return message

    def detokenize_request(self, raw: bytes) -> pb.DetokenizeRequest:
        """Parse a DetokenizeRequest.

        Raises:
            InvalidField: it has more than `MAX_TEXT_TOKENS`, or it is no such message.
        """
        self.check_size("input_ids", len(raw))
        _check_length(len(raw) // _MAX_ID_BYTES)
        message = pb.DetokenizeRequest()
        try:
            message.ParseFromString(raw)
        except DecodeError as error:
            raise InvalidField("message", f"is no DetokenizeRequest: {error}") from error
        _check_length(len(message.input_ids))
        return message

    def check_size(self, field: str, num_bytes: int) -> None:
        """Raise `InvalidField` for this field if a message has too many bytes."""
        if num_bytes > self.max_message_bytes:
            raise InvalidField(
                field,
                f"the message has {num_bytes} bytes, and the router takes {self.max_message_bytes}",
            )

    def _check_parts(self, parts: PartBytes, num_bytes: int, limits: RequestLimits) -> None:
        self.check_size("input_ids" if parts.input_ids > parts.text else "text", num_bytes)
        if num_bytes <= _PARSED_ANYWAY_BYTES:
            return
        if parts.rest > _MAX_REST_BYTES:
            raise InvalidField(
                "sampling_params",
                f"the request has {parts.rest} bytes beside its prompt, and the router takes "
                f"{_MAX_REST_BYTES}",
            )
        limits.check_prompt("input_ids", parts.input_ids // _MAX_ID_BYTES, is_exact=False)
        if self.longest_token_bytes is not None:
            at_least = -(-parts.text // self.longest_token_bytes)
            limits.check_prompt("text", at_least, is_exact=False)


def _check_length(tokens: int) -> None:
    if tokens > MAX_TEXT_TOKENS:
        raise InvalidField(
            "input_ids", f"has {tokens} tokens or more; the router takes {MAX_TEXT_TOKENS}"
        )
