"""Workers publish what their prefix indexes have, for routers of others."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from kvrelay.v1 import inference_pb2 as pb
from tests.cluster.in_process import in_process
from tests.engine.test_kv_events import Followed
from tests.net.zmq_subscriber import subscriber, until

PAGE_SIZE = 16
PROMPT = list(range(3, 100))


async def test_both_sides_publish_the_prompts_blocks(tiny: Path) -> None:
    async with (
        in_process(tiny, kv_events=True, page_size=PAGE_SIZE, kv_memory=8 << 20) as cluster,
        contextlib.AsyncExitStack() as stack,
    ):
        servers = await cluster.stub.GetServerInfo(pb.GetServerInfoRequest())
        subscribers = []
        for worker in servers.workers:
            host, _, port = worker.kv_events_address.rpartition(":")
            assert host == "127.0.0.1"
            subscribers.append(await stack.enter_async_context(subscriber(int(port), b"")))
        assert len(subscribers) == 2
        follower = [Followed(PAGE_SIZE) for _ in subscribers]
        request = pb.GenerateRequest(
            input_ids=pb.TokenIds(ids=PROMPT),
            sampling_params=pb.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        )
        sources = [worker._kv_events for worker in cluster.hosted]
        await until(lambda: all(source and source.had_subscribers for source in sources))
        tokens = list(PROMPT)
        async for response in cluster.stub.Generate(request):
            tokens += response.delta.token_ids
        for socket, followed in zip(subscribers, follower, strict=True):
            async with asyncio.timeout(60):
                while tuple(tokens[:96]) not in followed.blocks.values():
                    followed.take(await socket.recv_multipart())
