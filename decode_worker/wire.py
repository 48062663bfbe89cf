"""Between the hand-over's wire messages and its dataclasses, decode side."""

from __future__ import annotations

import torch

from kvrelay.kv_transfer.checksums import PageSum
from kvrelay.kv_transfer.errors import PeerRefusedError, ProtocolError
from kvrelay.kv_transfer.hand_over import (
    Announce,
    Ask,
    Beat,
    Done,
    Ended,
    EndReason,
    FirstToken,
    FromDecode,
    FromPrefill,
    Grant,
    PageRun,
    Released,
    Said,
)
from kvrelay.kv_transfer.peer import PeerDescription
from kvrelay.kv_transfer.spans import PoolLayout
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.v1 import hand_over_pb2

_END_REASONS = {
    hand_over_pb2.HandOverEnded.REASON_FINISHED: EndReason.FINISHED,
    hand_over_pb2.HandOverEnded.REASON_ABORTED: EndReason.ABORTED,
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


def to_wire(said: Said[FromDecode]) -> hand_over_pb2.HandOverRequest:
    """What the decode side says."""
    wire = hand_over_pb2.HandOverRequest(number=said.number)
    match said.message:
        case Grant():
            wire.grant.SetInParent()
        case Done():
            wire.done.sums.extend(map(_sum_to_wire, said.message.sums))
            wire.done.SetInParent()
        case Beat():
            wire.beat.SetInParent()
    return wire


def _sum_to_wire(page: PageSum) -> hand_over_pb2.PageSum:
    return hand_over_pb2.PageSum(pool=page.place.pool, page=page.place.page, value=page.value)


def from_wire(message: hand_over_pb2.HandOverResponse, vocab_size: int) -> Said[FromPrefill]:
    """What the prefill side says.

    Raises:
        ProtocolError: it is nothing that this side knows, or a token of another vocabulary.
    """
    return Said(message.number, _message_from_wire(message, vocab_size))


def _message_from_wire(message: hand_over_pb2.HandOverResponse, vocab_size: int) -> FromPrefill:
    match message.WhichOneof("message"):
        case "ask":
            return Ask()
        case "announce":
            announce = message.announce
            for token in announce.first_tokens:
                if token.token_id >= vocab_size:
                    raise ProtocolError(
                        f"first token {token.token_id} of a vocabulary of {vocab_size}"
                    )
            runs = (PageRun(run.first_page, tuple(run.page_ids)) for run in announce.runs)
            tokens = (FirstToken(t.token_id, t.finished) for t in announce.first_tokens)
            return Announce(tuple(runs), tuple(tokens))
        case "released":
            return Released(message.released.valid, message.released.mismatches)
        case "ended":
            reason = _END_REASONS.get(message.ended.reason, EndReason.FAILED)
            return Ended(reason, message.ended.detail)
        case "beat":
            return Beat()
        case other:
            raise ProtocolError(f"unknown hand-over message: {other}")


def peer_from_wire(message: hand_over_pb2.DescribeAgentResponse) -> PeerDescription:
    """A prefill worker's description of itself, unchecked but for its form.

    Raises:
        PeerRefusedError: a value is out of range.
    """
    try:
        *layouts, scratch = (
            PoolLayout(
                _geometry_from_wire(pool.geometry),
                pool.pages,
                pool.address,
                message.device_id,
                message.memory_type,
            )
            for pool in (*message.pools, message.scratch)
        )
    except (KeyError, ValueError) as error:
        raise PeerRefusedError(f"geometry of {message.incarnation}: {error}") from error
    return PeerDescription(
        incarnation=message.incarnation,
        metadata=message.agent_metadata,
        metadata_sha256=message.agent_metadata_sha256,
        layouts=tuple(layouts),
        scratch=scratch,
    )


def _geometry_from_wire(geometry: hand_over_pb2.PoolGeometry) -> KVGeometry:
    return KVGeometry(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=_DTYPES[geometry.dtype],
        page_size=geometry.page_size,
        order=PageOrder(geometry.order),
        latent=geometry.latent,
        window=geometry.window if geometry.HasField("window") else None,
        draft=geometry.draft,
    )
