"""Ask for several outputs of one prompt. The prompt is computed once, its pages are shared.

python examples/several_outputs.py [HOST:PORT]
"""

import sys

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
CHOICES = 3


def main() -> None:
    """Collect the deltas of each choice, which come in one stream, in any order."""
    sampling = pb.SamplingParams(n=CHOICES, temperature=0.9, seed=7, max_tokens=24)
    request = pb.GenerateRequest(text="My favourite colour is", sampling_params=sampling)
    texts = [""] * CHOICES
    with grpc.insecure_channel(SERVER) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for response in stub.Generate(request):
            if response.HasField("delta"):
                texts[response.delta.choice] += response.delta.text
            else:
                ends = response.complete.choices
    for text, end in zip(texts, ends, strict=True):
        print(f"{pb.FinishReason.Name(end.finish_reason)}: {text!r}")


if __name__ == "__main__":
    main()
