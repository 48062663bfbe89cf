"""Conversations in a simulation: their histories, as a router or a client keeps them, and turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.scheduler.commands import FromRouter
from kvrelay.wire.output import EndReason
from kvrelay.wire.submit import ForgetSessionRequest, KeptSession
from tests.engine.simulation import SimRequest, Simulation, SimWorker, reference

GOOD = {EndReason.STOP, EndReason.LENGTH}
UNBOUNDED = 1 << 20


@dataclass(eq=False)
class Conversation:
    """A session, or ordinary requests: what is said, and who generated the last turn."""

    simulation: Simulation
    name: str
    most_kept_tokens: int = UNBOUNDED
    owner: str = ""
    is_session: bool = True
    tokens: list[int] = field(default_factory=list)
    turn: SimRequest | None = None
    worker: SimWorker | None = None

    def say(
        self,
        new: list[int],
        max_tokens: int,
        place: tuple[SimWorker, SimWorker] | None = None,
        *,
        rewind_to: int | None = None,
        **options: Any,
    ) -> SimRequest:
        """Submit the next turn."""
        self.take()
        assert self.turn is None, "a turn runs"
        prompt = [*self.tokens[:rewind_to], *new]
        kept = KeptSession(self.name, self.most_kept_tokens, self.owner)
        session = kept if self.is_session else None
        self.turn = self.simulation.submit(
            prompt, max_tokens, session=session, place=place, **options
        )
        return self.turn

    def take(self) -> None:
        """Do what a router does when a turn has ended: only a good end makes history."""
        turn = self.turn
        if turn is None or not turn.ends.keys() >= {turn.prefill.name, turn.decode.name}:
            return
        self.turn = None
        if turn.ends[turn.decode.name].reason in GOOD or len(turn.output) == turn.max_tokens:
            self.tokens = [*turn.prompt, *turn.output]
        if self.worker not in (None, turn.decode):
            self.forget_on(self.worker)
        self.worker = turn.decode

    def forget_on(self, worker: SimWorker | None) -> None:
        if worker is not None:
            worker.inbox.post(FromRouter(worker.link, ForgetSessionRequest(self.name)))

    def close(self) -> None:
        for worker in self.simulation.workers:
            self.forget_on(worker)


def talk(conversation: Conversation, new: list[int], max_tokens: int, **options: Any) -> SimRequest:
    """Run one turn alone to its end; its tokens are right."""
    turn = conversation.say(new, max_tokens, **options)
    conversation.simulation.run()
    conversation.take()
    assert turn.output == reference(turn.prompt, max_tokens, turn.decode.windows)
    return turn


def computed_tokens(worker: SimWorker) -> int:
    """Tokens that the worker's forwards have computed."""
    labels = {"role": worker.role_name, "worker": worker.name, "model": "sim"}
    value = worker.context.metrics.registry.get_sample_value(
        "kvrelay_computed_tokens_total", labels
    )
    assert value is not None
    return int(value)
