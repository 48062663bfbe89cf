"""Ask a cluster through the client, which goes on at another router if one is lost.

python examples/client.py [HOST:PORT ...]
"""

import sys

from kvrelay.client import Client

SERVERS = sys.argv[1:] or ["127.0.0.1:50051"]


def main() -> None:
    """Print one output as it comes, and then two others."""
    with Client(SERVERS) as client:
        for response in client.generate("The capital of France is", temperature=0, max_tokens=32):
            print(response.delta.text, end="", flush=True)
        answer = client.answer("Water boils at", max_tokens=16, n=2)
    print()
    for output in answer.outputs:
        print(f"Water boils at|{output.text!r}")


if __name__ == "__main__":
    main()
