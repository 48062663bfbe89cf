"""Ask for several prompts at once with asyncio; the cluster computes them as one batch.

python examples/generate_async.py [HOST:PORT]
"""

import asyncio
import sys

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
PROMPTS = ("The capital of France is", "Water boils at", "The quick brown fox")


async def generate(stub: inference_pb2_grpc.InferenceServiceStub, prompt: str) -> str:
    """The whole output of one prompt."""
    sampling = pb.SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
    request = pb.GenerateRequest(text=prompt, sampling_params=sampling)
    return "".join([response.delta.text async for response in stub.Generate(request)])


async def main() -> None:
    """Print each prompt with its output."""
    async with grpc.aio.insecure_channel(SERVER) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        outputs = await asyncio.gather(*(generate(stub, prompt) for prompt in PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt}|{output!r}")


if __name__ == "__main__":
    asyncio.run(main())
