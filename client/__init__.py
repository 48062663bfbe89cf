"""A client of kvrelay clusters, for threads and for asyncio. It needs grpcio and protobuf only.

::

    access = Access(ca=Path("ca.pem"), token="...")
    with Client(["router-0:50051", "router-1:50051"], access) as client:
        for response in client.generate("The capital of France is", max_tokens=32):
            print(response.delta.text, end="", flush=True)

A request goes to the router that has the fewest calls of this client. If that router is lost, or
refuses the request for now, the client tries another one. The new router gives the same tokens from
the start; the client leaves out the ones that it has delivered.
"""

from kvrelay.client.access import Access
from kvrelay.client.answer import Answer
from kvrelay.client.asynchronous import AsyncClient
from kvrelay.client.blocking import Client, Stream
from kvrelay.client.errors import CallFailed, ClientError, Diverged
from kvrelay.client.requests import make_request

__all__ = [
    "Access",
    "Answer",
    "AsyncClient",
    "CallFailed",
    "Client",
    "ClientError",
    "Diverged",
    "Stream",
    "make_request",
]
