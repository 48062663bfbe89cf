"""Ask a running cluster and print the text as it comes, without asyncio.

python examples/generate.py [HOST:PORT]
"""

import sys

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def main() -> None:
    """Print one output, and then what it took."""
    with grpc.insecure_channel(SERVER) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(
            text="The capital of France is",
            sampling_params=pb.SamplingParams(temperature=0, max_tokens=32),
        )
        for response in stub.Generate(request):
            if response.HasField("delta"):
                print(response.delta.text, end="", flush=True)
            else:
                complete = response.complete
    reason = pb.FinishReason.Name(complete.finish_reason)
    print(f"\n{reason}: {complete.usage.completion_tokens} tokens, ", end="")
    print(f"{complete.timings.prefill_seconds:.3f} s in prefill")


if __name__ == "__main__":
    main()
