"""A public service that says what a test has written down."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc

DELTAS = (
    pb.GenerateDelta(index=0, token_ids=[260], text=" Paris"),
    pb.GenerateDelta(index=1, token_ids=[30, 1], text=", naïvely."),
)
COMPLETE = pb.GenerateComplete(
    finish_reason=pb.FINISH_REASON_STOP,
    matched_stop_string="\n",
    usage=pb.Usage(prompt_tokens=5, completion_tokens=3),
    timings=pb.PhaseTimings(
        queue_seconds=0.5, prefill_seconds=0.25, transfer_seconds=0.125, decode_seconds=2
    ),
    seed=2**63,
    choices=[pb.ChoiceEnd(finish_reason=pb.FINISH_REASON_STOP, matched_stop_string="\n")],
)


class ScriptedService(rpc.InferenceServiceServicer):
    """Answers every Generate with `events`; then fails, hangs or ends as told."""

    def __init__(self) -> None:
        self.events: Sequence[pb.GenerateDelta | pb.GenerateComplete] = (*DELTAS, COMPLETE)
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.hang = False
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.workers: list[pb.WorkerStatus] = []
        self.uptime_seconds = 12.5
        self.counts: pb.RequestCounts | None = None
        """What a caller with the right admin is told."""
        self.authorizations: list[str | bytes | None] = []
        """Of each call, what it brought."""

    def Generate(self, request, context):  # noqa: N802 (gRPC's name)
        self.requests.append(request)
        self._take_authorization(context)
        context.add_callback(self.cancelled.set)
        for event in self.events:
            kind = "delta" if isinstance(event, pb.GenerateDelta) else "complete"
            yield pb.GenerateResponse(request_id=request.request_id or "drawn", **{kind: event})
        if self.hang:
            self.cancelled.wait(30)
        if self.failure is not None:
            context.abort(*self.failure)

    def GetModelInfo(self, request, context):  # noqa: N802 (gRPC's name)
        self._take_authorization(context)
        return pb.GetModelInfoResponse(model="tiny")

    def GetServerInfo(self, request, context):  # noqa: N802 (gRPC's name)
        self._take_authorization(context)
        return pb.GetServerInfoResponse(
            version="0.1.0",
            uptime_seconds=self.uptime_seconds,
            live_requests=3,
            workers=self.workers,
            model_digest="0123456789ab",
            requests=self.counts,
        )

    def _take_authorization(self, context):
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))


@contextmanager
def serving(
    service: ScriptedService, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """Serve on a free port; yields the address."""
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_InferenceServiceServicer_to_server(service, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
