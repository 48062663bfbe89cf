"""Retry with the same request id: the client that lost its connection joins the running request.

The id and the seed are the client's. While the request lives, a call with the same id and body sees
all of it, from the beginning. When it lives no more, the call computes it again, and the seed makes
the tokens the same (exactly so in float32).

python examples/retry.py [HOST:PORT]
"""

import sys
import time
import uuid

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
ATTEMPTS = 5


def generate(stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest) -> str:
    """The whole output. Raises grpc.RpcError if it cannot be had."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return "".join(response.delta.text for response in stub.Generate(request))
        except grpc.RpcError as error:
            if error.code() not in RETRYABLE or attempt == ATTEMPTS:
                raise
            time.sleep(seconds_to_wait(error, attempt))
    raise AssertionError("the last attempt has returned or raised")


def seconds_to_wait(error: grpc.RpcError, attempt: int) -> float:
    """What the server asks for in `retry-after-ms`, else longer from time to time."""
    asked = dict(error.trailing_metadata() or ()).get("retry-after-ms")
    return float(asked) / 1000 if asked else 0.1 * 2**attempt


def main() -> None:
    """Two readers of one request, of which the first one goes away."""
    request = pb.GenerateRequest(
        request_id=str(uuid.uuid4()),
        text="Once upon a time",
        sampling_params=pb.SamplingParams(seed=7, max_tokens=64, ignore_eos=True),
    )
    with grpc.insecure_channel(SERVER) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first = stub.Generate(request)
        print(f"the first reader saw {next(first).delta.text!r}")
        second = stub.Generate(request)
        beginning = next(second).delta.text
        first.cancel()
        rest = "".join(response.delta.text for response in second)
        print(f"the second one saw {beginning + rest!r}")
        print(f"and a third one, later, {generate(stub, request)!r}")


if __name__ == "__main__":
    main()
