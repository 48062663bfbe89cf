"""Between the wire's messages and the engine's dataclasses. Nothing else here knows both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from kvrelay.engine.commands import Peer, Submit
from kvrelay.engine.config import Role
from kvrelay.engine.outputs import (
    Cause,
    End,
    EndReason,
    Load,
    Output,
    RequestKey,
    RouterLink,
    StepOutputs,
)
from kvrelay.engine.stop import FinishReason, StopConditions
from kvrelay.kv_transfer.attestation import Attestation
from kvrelay.mem_cache.account import Owner
from kvrelay.mem_cache.ledger import Ledger, PoolCounts
from kvrelay.model_runner.sampler import SampledToken
from kvrelay.model_runner.sampling_params import SamplingParams
from kvrelay.v1 import inference_pb2, worker_pb2

_END_REASONS = {
    EndReason.HANDED_OVER: worker_pb2.RequestEnd.REASON_HANDED_OVER,
    EndReason.ABORTED: worker_pb2.RequestEnd.REASON_ABORTED,
    EndReason.FAILED: worker_pb2.RequestEnd.REASON_FAILED,
    EndReason.RETRACTED: worker_pb2.RequestEnd.REASON_RETRACTED,
}
_CAUSES = {
    Cause.PEER_LOST: worker_pb2.RequestEnd.CAUSE_PEER_LOST,
    Cause.PEER_FAILED: worker_pb2.RequestEnd.CAUSE_PEER_FAILED,
    Cause.READ_FAILED: worker_pb2.RequestEnd.CAUSE_READ_FAILED,
    Cause.PAGE_MISMATCH: worker_pb2.RequestEnd.CAUSE_PAGE_MISMATCH,
    Cause.TRANSFER_REFUSED: worker_pb2.RequestEnd.CAUSE_TRANSFER_REFUSED,
    Cause.PROTOCOL_ERROR: worker_pb2.RequestEnd.CAUSE_PROTOCOL_ERROR,
}
_FINISH_REASONS = {
    FinishReason.STOP: worker_pb2.RequestEnd.REASON_STOP,
    FinishReason.LENGTH: worker_pb2.RequestEnd.REASON_LENGTH,
}


MAX_CHOICES = 16
"""Of one prompt."""


@dataclass(frozen=True, slots=True)
class SubmitRules:
    """What a worker must be told, and within which bounds."""

    role: Role
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def submit_from_wire(
    message: worker_pb2.SubmitRequest, link: RouterLink, rules: SubmitRules
) -> Submit:
    """A router's submission.

    Raises:
        ValueError: a field is missing or out of range; the text begins with its name.
    """
    params = message.sampling_params
    _check_ids("input_ids", message.input_ids, rules.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, rules.vocab_size)
    _check_ids("logit_bias", params.logit_bias, rules.vocab_size)
    if not message.input_ids:
        raise ValueError("input_ids: must not be empty")
    if params.max_tokens < 1:
        raise ValueError("max_tokens: must be at least 1")
    if not 1 <= params.n <= MAX_CHOICES:
        raise ValueError(f"n: must be from 1 to {MAX_CHOICES}")
    if message.first_choice >= MAX_CHOICES:
        raise ValueError(f"first_choice: must be below {MAX_CHOICES}")
    emitted = len(message.input_ids) - message.num_prompt_tokens
    if not 0 <= emitted < min(params.max_tokens, len(message.input_ids)):
        raise ValueError(
            f"num_prompt_tokens: {message.num_prompt_tokens} of {len(message.input_ids)} input_ids "
            f"leave {emitted} emitted tokens of at most {params.max_tokens}"
        )
    if emitted and params.n > 1:
        raise ValueError("n: must be 1 for a request that has emitted tokens")
    has_peer = message.HasField("prefill")
    if has_peer != (rules.role is Role.DECODE):
        raise ValueError("prefill: must be told to decode workers and to no others")
    first = message.first_choice
    return Submit(
        link=link,
        key=RequestKey(link.router, message.request_id, message.attempt, first),
        input_ids=tuple(message.input_ids),
        prompt_len=message.num_prompt_tokens,
        sampling=_sampling_from_wire(params),
        stops=_stops_from_wire(params, rules.eos_token_ids),
        choices=tuple(range(first, first + params.n)),
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        speculate=params.speculate,
        priority=message.priority,
        arrived=time.monotonic() - max(message.age_seconds, 0.0),
        prefill=Peer(message.prefill.address, message.prefill.incarnation) if has_peer else None,
    )


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    worst = max(token_ids, default=0)
    if worst >= vocab_size:
        raise ValueError(f"{field}: token id {worst} is not below the vocabulary of {vocab_size}")


def _sampling_from_wire(params: inference_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        logit_bias=dict(params.logit_bias),
    )


def _stops_from_wire(
    params: inference_pb2.SamplingParams, eos_token_ids: tuple[int, ...]
) -> StopConditions:
    eos = () if params.ignore_eos else eos_token_ids
    return StopConditions(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=frozenset({*eos, *params.stop_token_ids}),
        stop_strings=tuple(params.stop),
        skip_special_tokens=params.skip_special_tokens,
    )


def step_to_wire(step: StepOutputs) -> worker_pb2.AttachResponse:
    """One pass's outputs."""
    return worker_pb2.AttachResponse(
        outputs=[_output_to_wire(output) for output in step.outputs],
        load=_load_to_wire(step.load) if step.load else None,
    )


def _output_to_wire(output: Output) -> worker_pb2.RequestOutput:
    timings = output.timings
    message = worker_pb2.RequestOutput(
        request_id=output.key.request_id,
        attempt=output.key.attempt,
        index=output.index,
        token_ids=[token.token_id for token in output.tokens],
        logprobs=[_logprobs_to_wire(t) for t in output.tokens if t.logprob is not None],
        timings=inference_pb2.PhaseTimings(
            queue_seconds=timings.queue,
            prefill_seconds=timings.prefill,
            transfer_seconds=timings.transfer,
            decode_seconds=timings.decode,
        ),
        cached_tokens=output.cached_tokens,
        choice=output.key.choice,
        prompt_logprobs=map(_logprobs_to_wire, output.prompt_logprobs),
    )
    if output.end is not None:
        message.end.CopyFrom(_end_to_wire(output.end))
    return message


def _logprobs_to_wire(token: SampledToken) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        token_id=token.token_id,
        logprob=token.logprob,
        top=[inference_pb2.TokenLogprob(token_id=i, logprob=lp) for i, lp in token.top],
    )


def _end_to_wire(end: End) -> worker_pb2.RequestEnd:
    finish = end.finish
    if finish is None:
        return worker_pb2.RequestEnd(
            reason=_END_REASONS[end.reason],
            error=end.error,
            retryable=end.cause is not None,
            cause=_CAUSES[end.cause] if end.cause else None,
        )
    return worker_pb2.RequestEnd(
        reason=_FINISH_REASONS[finish.reason],
        matched_token_id=finish.matched_token_id,
        matched_stop_string=finish.matched_stop_string,
    )


def _load_to_wire(load: Load) -> inference_pb2.WorkerLoad:
    return inference_pb2.WorkerLoad(
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        waiting_tokens=load.waiting_tokens,
        pools=[_pool_to_wire(pool) for pool in load.pools],
        growth_tokens=load.growth_tokens,
        step_seconds=load.step_seconds,
        draining=load.draining,
        peers=map(_peer_to_wire, load.peers),
    )


def _peer_to_wire(peer: Attestation) -> inference_pb2.PeerTransfer:
    return inference_pb2.PeerTransfer(
        incarnation=peer.peer,
        backend=peer.backend,
        transports=peer.transports,
        read_gbps=peer.read_gbps,
        write_gbps=peer.write_gbps,
        refusal=peer.refusal,
    )


def _pool_to_wire(pool: PoolCounts) -> inference_pb2.PoolState:
    return inference_pb2.PoolState(
        pool=pool.pool,
        page_size=pool.page_size,
        total=pool.total,
        free=pool.free,
        held=pool.held,
        cached_evictable=pool.cached_evictable,
        cached_protected=pool.cached_protected,
        session=pool.session,
        quarantined=pool.quarantined,
        promised=pool.promised,
    )


def page_owners_to_wire(ledger: Ledger) -> worker_pb2.GetPageOwnersResponse:
    """Every page of every pool, in runs of one owner."""
    return worker_pb2.GetPageOwnersResponse(
        pools=[
            worker_pb2.PoolOwners(pool=shape.name, runs=_owned_runs(ledger.owner_map(pool)))
            for pool, shape in enumerate(ledger.pools)
        ]
    )


def _owned_runs(owners: Iterable[tuple[Owner, str]]) -> Iterator[worker_pb2.OwnedPages]:
    first = 0
    for (owner, holder), run in groupby(owners):
        count = sum(1 for _ in run)
        yield worker_pb2.OwnedPages(
            first_page=first, num_pages=count, owner=owner.name.lower(), holder=holder
        )
        first += count
