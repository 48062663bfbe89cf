"""Routers that say, call by call, what a test has written down."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc

WORDS = ("The", " quick", " brown", " fox", " jumps", " over", " it", ".")


def deltas(first: int = 0, last: int = len(WORDS), size: int = 1) -> list[pb.GenerateDelta]:
    """Some of an output that has a token for each word, so many in a delta."""
    return [
        pb.GenerateDelta(
            index=start,
            token_ids=range(100 + start, 100 + min(start + size, last)),
            text="".join(WORDS[start : min(start + size, last)]),
        )
        for start in range(first, last, size)
    ]


COMPLETE = pb.GenerateComplete(finish_reason=pb.FINISH_REASON_LENGTH, seed=7)


@dataclass
class Script:
    """What one call gets: some events, and then its end."""

    events: Sequence[pb.GenerateDelta | pb.GenerateComplete] = ()
    status: grpc.StatusCode | None = None
    detail: str = ""
    retry_after_ms: int | None = None
    hangs: bool = False
    """Until it is cancelled."""


WHOLE = Script([*deltas(), COMPLETE])


def unavailable(*events: pb.GenerateDelta, retry_after_ms: int | None = None) -> Script:
    return Script(events, grpc.StatusCode.UNAVAILABLE, "gone", retry_after_ms)


@dataclass
class ScriptedRouter(rpc.InferenceServiceServicer):
    """Answers calls by its scripts, one after the other; the last one serves all that follow."""

    scripts: list[Script] = field(default_factory=lambda: [WHOLE])
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    authorizations: list[str | bytes | None] = field(default_factory=list)
    called: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    aborts: list[str] = field(default_factory=list)
    address: str = ""

    def Generate(self, request, context):  # noqa: N802 (gRPC's name)
        self.requests.append(request)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self._watch(script, context)
        for event in script.events:
            kind = "delta" if isinstance(event, pb.GenerateDelta) else "complete"
            yield pb.GenerateResponse(request_id=request.request_id, **{kind: event})
        self._end(script, context)

    def GetModelInfo(self, request, context):  # noqa: N802 (gRPC's name)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self._watch(script, context)
        self._end(script, context)
        return pb.GetModelInfoResponse(model=self.address)

    def Abort(self, request, context):  # noqa: N802 (gRPC's name)
        self.aborts.append(request.request_id)
        return pb.AbortResponse(aborted=request.request_id == self.address)

    def _watch(self, script: Script, context: grpc.ServicerContext) -> None:
        if script.hangs:
            context.add_callback(self.cancelled.set)

    def _end(self, script: Script, context: grpc.ServicerContext) -> None:
        self.called.set()
        if script.hangs:
            self.cancelled.wait(30)
        if script.status is not None:
            if script.retry_after_ms is not None:
                context.set_trailing_metadata((("retry-after-ms", str(script.retry_after_ms)),))
            context.abort(script.status, script.detail)


@contextmanager
def serving(
    *routers: ScriptedRouter, credentials: grpc.ServerCredentials | None = None
) -> Iterator[list[str]]:
    """Serve on free ports; yields the addresses."""
    with ExitStack() as stack:
        for router in routers:
            server = grpc.server(ThreadPoolExecutor(4))
            rpc.add_InferenceServiceServicer_to_server(router, server)
            if credentials is None:
                port = server.add_insecure_port("127.0.0.1:0")
            else:
                port = server.add_secure_port("127.0.0.1:0", credentials)
            router.address = f"127.0.0.1:{port}"
            server.start()
            stack.callback(_stop, server)
        yield [router.address for router in routers]


def _stop(server: grpc.Server) -> None:
    server.stop(None).wait()
