"""Between the wire's messages and the router's own types. No rules live here."""

from __future__ import annotations

from itertools import chain, repeat

from kvrelay.router.discovery import WorkerEndpoint, WorkerRole
from kvrelay.router.events import (
    ChoiceEnd,
    Completion,
    Delta,
    Event,
    FinishReason,
    PhaseTimings,
    Token,
    TokenLogprobs,
)
from kvrelay.router.generation import SamplingParams, Submission
from kvrelay.router.load import PeerTransfer, PoolState, WorkerLoad
from kvrelay.router.worker_output import EndReason, FailureReason, WorkerEnd, WorkerOutput
from kvrelay.v1 import inference_pb2, worker_pb2

_ROLES = {
    WorkerRole.PREFILL: inference_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: inference_pb2.WORKER_ROLE_DECODE,
    WorkerRole.AGGREGATED: inference_pb2.WORKER_ROLE_AGGREGATED,
}
_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
_END_REASONS = {
    worker_pb2.RequestEnd.REASON_STOP: EndReason.STOP,
    worker_pb2.RequestEnd.REASON_LENGTH: EndReason.LENGTH,
    worker_pb2.RequestEnd.REASON_ABORTED: EndReason.ABORTED,
    worker_pb2.RequestEnd.REASON_HANDED_OVER: EndReason.HANDED_OVER,
    worker_pb2.RequestEnd.REASON_FAILED: EndReason.FAILED,
    worker_pb2.RequestEnd.REASON_RETRACTED: EndReason.RETRACTED,
}
_CAUSES = {
    worker_pb2.RequestEnd.CAUSE_PEER_LOST: FailureReason.PEER_LOST,
    worker_pb2.RequestEnd.CAUSE_PEER_FAILED: FailureReason.PEER_FAILED,
    worker_pb2.RequestEnd.CAUSE_READ_FAILED: FailureReason.READ_FAILED,
    worker_pb2.RequestEnd.CAUSE_PAGE_MISMATCH: FailureReason.PAGE_MISMATCH,
    worker_pb2.RequestEnd.CAUSE_TRANSFER_REFUSED: FailureReason.TRANSFER_REFUSED,
    worker_pb2.RequestEnd.CAUSE_PROTOCOL_ERROR: FailureReason.PROTOCOL_ERROR,
}
"""Those of a newer worker are not known here."""


# To workers.


def hello_command(router_id: str, incarnation: str) -> worker_pb2.AttachRequest:
    """The first message on a stream."""
    hello = worker_pb2.AttachHello(router=router_id, incarnation=incarnation)
    return worker_pb2.AttachRequest(hello=hello)


def submit_command(
    submission: Submission, prefill: WorkerEndpoint | None
) -> worker_pb2.AttachRequest:
    """An attempt for one worker; `prefill` only for a decode worker."""
    request = submission.request
    submit = worker_pb2.SubmitRequest(
        request_id=submission.request_id,
        attempt=submission.attempt,
        input_ids=submission.input_ids,
        num_prompt_tokens=submission.num_prompt_tokens,
        first_choice=submission.choices.start,
        sampling_params=_sampling_message(request.sampling, submission),
        priority=request.priority,
        age_seconds=submission.age_seconds,
    )
    if prefill is not None:
        submit.prefill.address = prefill.address
        submit.prefill.incarnation = prefill.incarnation
    return worker_pb2.AttachRequest(submit=submit)


def cancel_command(request_id: str, attempt: int) -> worker_pb2.AttachRequest:
    """The worker is to give the request up."""
    cancel = worker_pb2.CancelRequest(request_id=request_id, attempt=attempt)
    return worker_pb2.AttachRequest(cancel=cancel)


def _sampling_message(
    sampling: SamplingParams, submission: Submission
) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        logprobs=sampling.logprobs,
        logit_bias=dict(sampling.logit_bias),
        n=len(submission.choices),
        prompt_logprobs=submission.prompt_logprobs,
        speculate=sampling.speculate,
    )


# From workers.


def read_output(message: worker_pb2.RequestOutput) -> WorkerOutput:
    """One output of an `AttachResponse`."""
    return WorkerOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        index=message.index,
        tokens=tuple(
            Token(token_id, None if logprobs is None else _read_logprobs(logprobs))
            for token_id, logprobs in zip(
                message.token_ids, chain(message.logprobs, repeat(None)), strict=False
            )
        ),
        timings=_read_timings(message.timings),
        cached_tokens=message.cached_tokens,
        end=_read_end(message.end) if message.HasField("end") else None,
        choice=message.choice,
        prompt_logprobs=tuple(map(_read_logprobs, message.prompt_logprobs)),
    )


def read_load(message: inference_pb2.WorkerLoad) -> WorkerLoad:
    """The load of an `AttachResponse`."""
    return WorkerLoad(
        waiting_requests=message.waiting_requests,
        running_requests=message.running_requests,
        waiting_tokens=message.waiting_tokens,
        pools=tuple(_read_pool(pool) for pool in message.pools),
        growth_tokens=message.growth_tokens,
        step_seconds=message.step_seconds,
        draining=message.draining,
        peers=tuple(map(_read_peer, message.peers)),
    )


def _read_logprobs(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.token_id, message.logprob, top)


def _read_timings(message: inference_pb2.PhaseTimings) -> PhaseTimings:
    return PhaseTimings(
        queue=message.queue_seconds,
        prefill=message.prefill_seconds,
        transfer=message.transfer_seconds,
        decode=message.decode_seconds,
    )


def _read_end(message: worker_pb2.RequestEnd) -> WorkerEnd:
    reason = _END_REASONS.get(message.reason)
    if reason is None:
        return WorkerEnd(EndReason.FAILED, error=f"unknown end reason {message.reason}")
    matched_field = message.WhichOneof("matched_stop")
    matched = getattr(message, matched_field) if matched_field else None
    return WorkerEnd(reason, matched, message.error, message.retryable, _CAUSES.get(message.cause))


def _read_peer(message: inference_pb2.PeerTransfer) -> PeerTransfer:
    return PeerTransfer(
        incarnation=message.incarnation,
        backend=message.backend,
        transports=message.transports,
        read_gbps=message.read_gbps,
        write_gbps=message.write_gbps,
        refusal=message.refusal,
    )


def _peer_message(peer: PeerTransfer) -> inference_pb2.PeerTransfer:
    return inference_pb2.PeerTransfer(
        incarnation=peer.incarnation,
        backend=peer.backend,
        transports=peer.transports,
        read_gbps=peer.read_gbps,
        write_gbps=peer.write_gbps,
        refusal=peer.refusal,
    )


def _read_pool(message: inference_pb2.PoolState) -> PoolState:
    return PoolState(
        pool=message.pool,
        page_size=message.page_size,
        total=message.total,
        free=message.free,
        held=message.held,
        cached_evictable=message.cached_evictable,
        cached_protected=message.cached_protected,
        session=message.session,
        quarantined=message.quarantined,
        promised=message.promised,
    )


# To clients.


def event_response(request_id: str, event: Event) -> inference_pb2.GenerateResponse:
    """One event of a request's stream."""
    if isinstance(event, Delta):
        return inference_pb2.GenerateResponse(request_id=request_id, delta=_delta_message(event))
    complete = _completion_message(event)
    return inference_pb2.GenerateResponse(request_id=request_id, complete=complete)


def worker_status(
    endpoint: WorkerEndpoint, *, ready: bool, draining: bool, load: WorkerLoad
) -> inference_pb2.WorkerStatus:
    """A worker as GetServerInfo and GetLoads show it."""
    return inference_pb2.WorkerStatus(
        worker=endpoint.worker,
        role=_ROLES[endpoint.role],
        incarnation=endpoint.incarnation,
        address=endpoint.address,
        metrics_address=endpoint.metrics_address,
        ready=ready,
        draining=draining,
        load=inference_pb2.WorkerLoad(
            waiting_requests=load.waiting_requests,
            running_requests=load.running_requests,
            waiting_tokens=load.waiting_tokens,
            pools=[_pool_message(pool) for pool in load.pools],
            growth_tokens=load.growth_tokens,
            step_seconds=load.step_seconds,
            draining=load.draining,
            peers=map(_peer_message, load.peers),
        ),
    )


def _delta_message(delta: Delta) -> inference_pb2.GenerateDelta:
    return inference_pb2.GenerateDelta(
        index=delta.index,
        token_ids=[token.token_id for token in delta.tokens],
        text=delta.text,
        logprobs=[_logprobs_message(t.logprobs) for t in delta.tokens if t.logprobs is not None],
        choice=delta.choice,
        prompt_logprobs=map(_logprobs_message, delta.prompt_logprobs),
    )


def _logprobs_message(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[
            inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in logprobs.top
        ],
    )


def _choice_end_message(end: ChoiceEnd) -> inference_pb2.ChoiceEnd:
    matched = end.matched
    return inference_pb2.ChoiceEnd(
        finish_reason=_FINISH_REASONS[end.finish_reason],
        matched_token_id=matched if isinstance(matched, int) else None,
        matched_stop_string=matched if isinstance(matched, str) else None,
    )


def _completion_message(completion: Completion) -> inference_pb2.GenerateComplete:
    timings, choices = completion.timings, list(map(_choice_end_message, completion.choices))
    first = choices[0]
    matched = first.WhichOneof("matched_stop")
    return inference_pb2.GenerateComplete(
        finish_reason=first.finish_reason,
        **({matched: getattr(first, matched)} if matched else {}),
        choices=choices,
        usage=inference_pb2.Usage(
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            cached_tokens=completion.cached_tokens,
        ),
        timings=inference_pb2.PhaseTimings(
            queue_seconds=timings.queue,
            prefill_seconds=timings.prefill,
            transfer_seconds=timings.transfer,
            decode_seconds=timings.decode,
        ),
        seed=completion.seed,
    )


def _pool_message(pool: PoolState) -> inference_pb2.PoolState:
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
