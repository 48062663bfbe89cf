"""Validation of a client's message, and the request for workers made from it.

Nothing is allocated for a request before it has passed here. The module `sampling_params` checks
its sampling parameters.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.router.admission.max_tokens import OutputLimit, max_tokens_of
from kvrelay.router.admission.prompt_input import Encode, Prompt, prompt_of
from kvrelay.router.admission.sampling_params import (
    check_sampling_params,
    check_token_ids,
    read_sampling_params,
)
from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.callers import ANYBODY, Caller, Right
from kvrelay.router.errors import InvalidField, NotPermitted, UnknownModel
from kvrelay.router.generation import GenerationRequest, PromptMarks
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.sessions import Turn
from kvrelay.v1 import inference_pb2
from kvrelay.wire.submit import RequestKey, SubmitRequest

MAX_REQUEST_ID_BYTES = 128
MAX_CACHE_SALT_BYTES = 128


@dataclass(frozen=True, slots=True)
class Validator:
    """A validator of requests for one model.

    Args:
        model_names: the model's names for clients; a request that names no model is for it, too.
        encode: tokenizes a prompt, with the tokenizer's special tokens.
        default_max_tokens: the operator's `max_tokens` of a request that sets none; less where
            less fits. None: what the endpoint says.
        seeds: draws the seeds of requests that set none.
        marks_of: computes the marks of a prompt in a namespace; for any thread.
    """

    model_names: Sequence[str]
    encode: Encode
    default_max_tokens: int | None
    seeds: Seeds
    marks_of: Callable[[Sequence[int], str], PromptMarks] = lambda input_ids, namespace: {}

    def check(
        self,
        message: inference_pb2.GenerateRequest,
        limits: RequestLimits,
        caller: Caller = ANYBODY,
        prompt: Prompt | None = None,
        output: OutputLimit = OutputLimit.STRICT,
    ) -> None:
        """Check all that is quick: everything that does not depend on the prompt's tokens.

        Args:
            message: the client's message; it has no prompt if `prompt` is given.
            limits: the workers' limits.
            caller: the client that sends it.
            prompt: the prompt; None: it is in the message.
            output: the rule for `max_tokens`.

        Raises:
            InvalidField: a field cannot be served as it is; the error names it.
            NotPermitted: the caller may not set a field so; the error names it.
        """
        self._check_envelope(message)
        if message.priority < 0 and not caller.may(Right.PRIORITIES):
            raise NotPermitted("priority", caller, Right.PRIORITIES)
        check_sampling_params(message.sampling_params, limits.vocab_size)
        prompt = prompt or prompt_of(message, self.encode)
        if prompt.num_tokens is not None:
            limits.check_prompt(prompt.field, prompt.num_tokens, output_tokens=output.least_output)

    def validate(
        self,
        message: inference_pb2.GenerateRequest,
        limits: RequestLimits,
        caller: Caller = ANYBODY,
        prompt: Prompt | None = None,
        turn: Turn | None = None,
        cache_salt: str | None = None,
        output: OutputLimit = OutputLimit.STRICT,
    ) -> GenerationRequest:
        """Make the request with every field concrete; safe to call from any thread.

        The arguments are those of `check`, and for a session's request its turn and the session's
        cache salt. If `cache_salt` is None, the message's is used.

        Raises:
            InvalidField: a field cannot be served as it is; the error names it.
            NotPermitted: the caller may not set a field so; the error names it.
        """
        prompt = prompt or prompt_of(message, self.encode)
        self.check(message, limits, caller, prompt, output)
        params = message.sampling_params
        input_ids = _input_ids(prompt, limits)
        limits.check_prompt(prompt.field, len(input_ids), output_tokens=output.least_output)
        max_tokens, open_ended = max_tokens_of(
            params, len(input_ids), limits, output, self.default_max_tokens
        )
        _check_queueable(prompt.field, len(input_ids), caller)
        namespace = caller.namespace(message.cache_salt if cache_salt is None else cache_salt)
        request_id = message.request_id or uuid.uuid4().hex
        seed = self.seeds.draw(caller.name, request_id)
        return GenerationRequest(
            submission=SubmitRequest(
                RequestKey("", request_id, 0),
                (),
                len(input_ids),
                read_sampling_params(params, max_tokens, seed, prompt.reasoning),
                priority=message.priority,
                namespace=namespace,
                open_ended=open_ended,
            ),
            fingerprint=fingerprint(message),
            input_ids=input_ids,
            caller=caller,
            marks=self.marks_of(input_ids, namespace),
            turn=turn,
        )

    def _check_envelope(self, message: inference_pb2.GenerateRequest) -> None:
        """Check the request id, the salt and the model."""
        _check_bytes("request_id", message.request_id, MAX_REQUEST_ID_BYTES)
        _check_bytes("cache_salt", message.cache_salt, MAX_CACHE_SALT_BYTES)
        if message.model and message.model not in self.model_names:
            raise UnknownModel(self.model_names, message.model)


def _check_bytes(field: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise InvalidField(field, f"must have at most {most} bytes, got {size}")


def _check_queueable(prompt_field: str, prompt_tokens: int, caller: Caller) -> None:
    """Refuse a prompt that exceeds the caller's limit alone: a retry would not help."""
    most = caller.max_queued_prompt_tokens
    if most is not None and prompt_tokens > most:
        raise InvalidField(
            prompt_field,
            f"the prompt has {prompt_tokens} tokens, and the token {caller.name} may queue {most} "
            "(max_queued_prompt_tokens in --auth-token-file)",
        )


def _input_ids(prompt: Prompt, limits: RequestLimits) -> Sequence[int]:
    input_ids = prompt.input_ids(limits)
    if not input_ids:
        raise InvalidField(prompt.field, "the prompt is empty")
    check_token_ids(prompt.field, input_ids, limits.vocab_size)
    return input_ids


def fingerprint(message: inference_pb2.GenerateRequest) -> bytes:
    """The digest of the message as the client sent it."""
    body = message.SerializeToString(deterministic=True)
    return hashlib.blake2b(body, digest_size=16).digest()
