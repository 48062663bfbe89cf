"""What is known of the bytes between two workers: compared, measured, refused."""

from __future__ import annotations

import grpc
import pytest

from tests.cluster.running import running

PROMPT = [(13 * i) % 500 for i in range(300)]
OPTIONS = {"dtype": "float32", "page_size": 4, "chunk_tokens": 64, "kv_memory": 2 << 20}


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
async def test_all_pages_are_compared_and_are_the_same(ray, tiny, order):
    async with running(tiny, page_order=order, verify_pages="all", **OPTIONS) as cluster:
        answer = await cluster.generate(PROMPT, temperature=0, max_tokens=8)
        assert len(answer.tokens) == 8
        assert await cluster.metric("kvrelay_verified_pages_total", role="decode") == 75
        assert await cluster.metric("kvrelay_page_mismatches_total") == 0
        (decode,) = [worker for worker in await cluster.status() if worker.load.peers]
        (peer,) = decode.load.peers
        assert (peer.backend, peer.refused) == ("UCX", False)
        gbps = await cluster.metric("kvrelay_transfer_attested_gbps", peer=peer.incarnation)
        assert gbps == pytest.approx(peer.gbps) > 0
        await cluster.assert_at_baseline()


async def test_a_pair_that_is_too_slow_serves_nothing_and_says_why(ray, tiny):
    async with running(tiny, min_transfer_gbps=1e6, strict=True, **OPTIONS) as cluster:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.generate(PROMPT, temperature=0, max_tokens=8)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.value.details().startswith("transfer_refused: decode-0: ")
            assert "1e+06 GB/s are asked for" in refused.value.details()
        assert await cluster.metric("kvrelay_transfer_refusals_total") == 1
        await cluster.assert_at_baseline()
