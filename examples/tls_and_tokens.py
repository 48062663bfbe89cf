"""Ask a cluster that wants TLS and a bearer token.

python examples/tls_and_tokens.py HOST:PORT CA_FILE TOKEN_FILE
"""

import sys
from pathlib import Path

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc


def main() -> None:
    """Print one output."""
    server, ca, token_file = sys.argv[1:]
    # The token goes with every call, and never over a channel without TLS.
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(Path(ca).read_bytes()),
        grpc.access_token_call_credentials(Path(token_file).read_text().strip()),
    )
    with grpc.secure_channel(server, credentials) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(
            text="The capital of France is",
            sampling_params=pb.SamplingParams(temperature=0, max_tokens=32),
        )
        for response in stub.Generate(request):
            print(response.delta.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
