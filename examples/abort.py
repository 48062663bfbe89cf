"""End a request before it is done: its memory comes back on both workers.

Closing the stream (`call.cancel()`, or a client that goes away) does the same, once nobody else
reads it. `Abort` works from anywhere, by the request's id, and lets the stream complete.

python examples/abort.py [HOST:PORT]
"""

import sys
import uuid

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def main() -> None:
    """Abort a long request when its first tokens have come."""
    with grpc.insecure_channel(SERVER) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(
            request_id=str(uuid.uuid4()),
            text="Once upon a time",
            sampling_params=pb.SamplingParams(max_tokens=2000, ignore_eos=True),
        )
        for response in stub.Generate(request):
            if response.HasField("complete"):
                reason = pb.FinishReason.Name(response.complete.finish_reason)
                print(f"{reason} after {response.complete.usage.completion_tokens} tokens")
            elif response.delta.index == 0:
                answer = stub.Abort(pb.AbortRequest(request_id=request.request_id))
                print(f"aborted: {answer.aborted}")


if __name__ == "__main__":
    main()
