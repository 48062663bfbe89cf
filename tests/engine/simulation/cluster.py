"""A cluster whose events come in a random order."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvrelay.decode_worker.hand_over_stream import HandOverStream as DecodeStream
from kvrelay.decode_worker.hand_over_stream import PeerMessage, PeerProbed, StreamLost
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.scheduler.commands import Attach, Detach, PeerDied, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.storage.storage_pages import PageStore
from kvrelay.prefill_worker.request import (
    HandOverStream as PrefillStream,
)
from kvrelay.prefill_worker.request import (
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from kvrelay.wire.load import PeerTransport
from kvrelay.wire.submit import CancelRequest, RequestKey
from kvrelay.wire.worker_info import WorkerRole
from tests.engine.simulation.model import FULL, Windows
from tests.engine.simulation.router import SimRequest, SimRouter
from tests.engine.simulation.worker import MAX_TOKENS, SimWorker
from tests.late_device import LateStreams


class Simulation(SimRouter):
    """A cluster whose events come in a random but reproducible order.

    A test may replace `end_read` and `carry_messages`, besides what `SimRouter` names, of
    one simulation, to let reads take long or messages get lost.
    """

    write_bytes_per_second = 1e9
    """From decode to prefill workers: what these are lent is read so fast."""
    clock = 0.0
    """The moment; it goes on where clocks are virtual."""
    late = False
    """Devices compute as late as events allow. A test sets it for all of its simulations."""
    slow_forwards = False
    """Forwards of decode workers end only when nothing else can happen."""

    def __init__(
        self,
        seed: int,
        page_size: int,
        pages: int,
        rows: int,
        chunk: int,
        *,
        cached: bool = True,
        windows: Windows = FULL,
        aggregated: bool = False,
        workers: int = 2,
        tokenizer: Any = None,
        most_tokens: int = MAX_TOKENS,
        local: float = 0.0,
        host_pages: int = 0,
        make_store: Callable[[SimWorker], PageStore] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(random.Random(seed), local)
        options = {
            "audit_pages": True,
            "model_path": None,
            "worker_timeout": math.inf,
            "prefix_wait": math.inf,
            **options,
        }

        def make(name: str, role: WorkerRole) -> SimWorker:
            config = WorkerConfig(
                name, role, model_name="sim", page_size=page_size, chunk_tokens=chunk, **options
            )
            return SimWorker(
                name,
                role,
                pages,
                page_size,
                rows,
                cached,
                windows,
                config,
                tokenizer,
                most_tokens,
                host_pages,
                make_store,
                device=LateStreams(self.random) if self.late else None,
                now=lambda: self.clock,
            )

        if aggregated:
            self.prefills = self.decodes = [
                make(f"a{i}", WorkerRole.AGGREGATED) for i in range(workers)
            ]
        else:
            self.prefills = [make(f"p{i}", WorkerRole.PREFILL) for i in range(workers)]
            self.decodes = [make(f"d{i}", WorkerRole.DECODE) for i in range(workers)]
        self.workers = list(dict.fromkeys([*self.prefills, *self.decodes]))
        self.by_name = {worker.name: worker for worker in self.workers}
        """All workers, those included that have left."""
        self._make = make
        self._dead: set[str] = set()
        self.pairs: list[tuple[SimWorker, DecodeStream, SimWorker, PrefillStream]] = []
        self.pulls: list[Pull] = []
        """Reads that have ended well."""

    def _disturb(self, key: RequestKey) -> None:
        for one in self.requests.values():
            if one.key.of_choice(0) == key.of_choice(0):
                one.disturbed = True

    def cancel(self, request: SimRequest, worker: SimWorker) -> None:
        self._disturb(request.key)
        worker.inbox.post(CancelRequest(request.key))

    def break_stream(self) -> None:
        """A hand-over stream is lost under both sides."""
        if self.pairs:
            pair = self.random.choice(self.pairs)
            self._disturb(pair[1].key)
            self._unpair(pair)

    def fail_read(self) -> None:
        """A read fails while its late bytes still arrive: the fence passes later, by death."""
        readers = [worker for worker in self.workers if worker.agent.ordered]
        if readers:
            worker = self.random.choice(readers)
        if readers:
            entry = self.random.choice(worker.agent.ordered)
            worker.agent.ordered.remove(entry)
            pull, on_end = entry
            pull.state, pull.error = PullState.FAILED, "injected"
            on_end(pull)
            worker.agent.ordered.append((pull, lambda _: None))
            for request in self.submitted:
                if pull.peer in (request.prefill.name, request.decode.name):
                    request.disturbed = True

    def detach(self, worker: SimWorker) -> None:
        """The router's stream to a worker ends, and a new one comes."""
        for request in self.submitted:
            if worker in (request.prefill, request.decode):
                request.disturbed = True
                self.cancel_on_other_worker(request, worker)
        worker.inbox.post(Detach(worker.link))
        worker.link = RouterLink("router")
        worker.inbox.post(Attach(worker.link))

    def replace(self, worker: SimWorker) -> SimWorker:
        """A worker that has drained leaves; another one takes its place."""
        assert worker.drained
        assert not worker.context.requests
        assert worker.agent.serving == 0
        worker.kv_cache.audit.check_pages()
        successor = self._make(worker.name + "'", worker.role_name)
        self.by_name[successor.name] = successor
        for workers in {id(w): w for w in (self.workers, self.prefills, self.decodes)}.values():
            if worker in workers:
                workers[workers.index(worker)] = successor
        for message in worker.inbox.take_all() if worker.inbox else ():
            if isinstance(message, Submit):
                self._lose(worker, message)
        for pair in [pair for pair in self.pairs if worker in (pair[0], pair[2])]:
            self._unpair(pair)
        for decode in self.decodes:
            decode.inbox.post(PeerDied(worker.name))
        return successor

    def kill(self, worker: SimWorker) -> SimWorker:
        """A worker dies with all that it has not sent; another one takes its place."""
        self._dead.add(worker.name)
        successor = self._make(worker.name + "'", worker.role_name)
        self.by_name[successor.name] = successor
        for workers in {id(w): w for w in (self.workers, self.prefills, self.decodes)}.values():
            if worker in workers:
                workers[workers.index(worker)] = successor
        for pair in [pair for pair in self.pairs if worker in (pair[0], pair[2])]:
            self._unpair(pair)
        for other in self.workers:
            other.inbox.post(PeerDied(worker.name))
        self.lose_worker(worker)
        return successor

    def step(self) -> bool:
        """Let one random thing happen; returns whether anything could."""
        actions: list[Callable[[], None]] = []
        for worker in self.workers:
            if worker.inbox:
                actions.append(worker.turn)
            actions += self._forward_actions(worker)
            if worker.copies and self._copy_is_home(worker) and self.can_end_copy(worker):
                actions.append(worker.end_copy)
            if (
                worker.storage is not None
                and worker.storage.orders
                and self.can_end_storage(worker)
            ):
                actions.append(worker.end_storage)
            if self._reads_that_come(worker):
                actions.append(partial(self.end_read, worker))
            if worker.agent.to_hash:
                actions.append(worker.hash)
            if worker.opened:
                actions.append(partial(self._open, worker))
        actions += [partial(self.carry_messages, pair) for pair in self.pairs if self._ready(pair)]
        if self.slow_forwards:
            slow = [w.end_step for w in self.decodes if w.steps]
            slow += [w.device.run_one for w in self.decodes if w.device is not None]
            actions = [action for action in actions if action not in slow] or actions
        if not actions:
            return False
        self.random.choice(actions)()
        self.collect_outputs()
        return True

    def _forward_actions(self, worker: SimWorker) -> list[Callable[[], None]]:
        """What can happen to the steps of a worker."""
        device, may_end = worker.device, bool(worker.steps) and self.can_end_step(worker)
        if device is None:
            return [worker.end_step] if may_end else []
        actions: list[Callable[[], None]] = []
        if worker.not_taken:
            actions.append(worker.take_step)
        if device.can_run and (may_end or not worker.steps):
            actions.append(device.run_one)
        if may_end and worker.is_home:
            actions.append(worker.read_home)
        return actions

    def _copy_is_home(self, worker: SimWorker) -> bool:
        return worker.device is None or worker.copies_home[0].passed()

    def can_end_step(self, worker: SimWorker) -> bool:
        """Whether a forward that was launched has had time to end."""
        return True

    def can_end_copy(self, worker: SimWorker) -> bool:
        """Whether a copy that was ordered has had time to end."""
        return True

    def can_end_storage(self, worker: SimWorker) -> bool:
        """Whether what was ordered of storage has had time to end."""
        return True

    def on_read(self, worker: SimWorker, pull: Pull) -> None:
        """The bytes of a read have arrived; they can be tampered with."""

    def run(self, limit: int = 200_000) -> None:
        """Let random things happen until nothing can any more."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the simulation does not come to rest")

    def settle_deaths(self) -> None:
        """Confirm to every decode worker that late bytes cannot come any more."""
        for worker in self.decodes:
            for prefill in self.prefills:
                worker.inbox.post(PeerDied(prefill.name))

    def assert_at_baseline(self) -> None:
        for worker in self.workers:
            worker.kv_cache.audit.check_pages()
            for counts in worker.kv_cache.audit.counts():
                assert counts.free + counts.cached_evictable == counts.total, worker.name
                assert counts.promised == 0, worker.name
            if worker.tier is not None:
                worker.tier.pages.check_pages()
                counts = worker.tier.pages.counts()
                assert counts.free + counts.cached_evictable == counts.total, worker.name
            assert not worker.context.requests, worker.name
            assert not waits_kept(worker), worker.name
            assert worker.agent.serving == 0, worker.name

    def _open(self, worker: SimWorker) -> None:
        stream = worker.opened.pop(0)
        prefill = self.by_name[stream.peer.incarnation]
        if prefill not in self.prefills:
            worker.inbox.post(StreamLost(stream, "it has left"))
            return
        stream.begin(time.monotonic())
        probe = PeerTransport(prefill.name, write_bytes_per_second=self.write_bytes_per_second)
        worker.inbox.post(PeerProbed(probe))
        other = PrefillStream(stream.key.of_choice(0), worker.name)
        prefill.inbox.post(StreamOpened(other))
        self.pairs.append((worker, stream, prefill, other))

    def _ready(self, pair: Any) -> bool:
        return not (pair[1].is_empty and pair[3].is_empty)

    def carry_messages(self, pair: Any) -> None:
        """Hand over what both sides of a hand-over stream have sent."""
        decode, mine, prefill, theirs = pair
        for message in mine.take_all():
            if message is None:
                self._unpair(pair)
                return
            prefill.inbox.post(StreamMessage(theirs, message))
        for message in theirs.take_all():
            decode.inbox.post(PeerMessage(mine, message))

    def _unpair(self, pair: Any) -> None:
        decode, mine, prefill, theirs = pair
        self.pairs.remove(pair)
        prefill.inbox.post(StreamClosed(theirs))
        decode.inbox.post(StreamLost(mine, "closed"))

    def _reads_that_come(self, worker: SimWorker) -> list[tuple[Pull, Callable[[Pull], None]]]:
        """Those that were ordered: the bytes of a worker that has died never come."""
        dead = self._dead
        return [entry for entry in worker.agent.ordered if entry[0].peer not in dead]

    def end_read(self, worker: SimWorker) -> None:
        """Move one read's bytes as they are on the other side now, and end it."""
        entry = self.random.choice(self._reads_that_come(worker))
        pull, on_end = entry
        peer = self.by_name[pull.peer]
        worker.model.read(peer.model, pull)
        self.on_read(worker, pull)
        if pull.state is PullState.FAILED:
            return
        worker.agent.ordered.remove(entry)
        self.pulls.append(pull)
        pull.state = PullState.DONE
        pull.settle()
        on_end(pull)


def waits_kept(worker: SimWorker) -> list[Any]:
    """What is kept of requests that wait."""
    scheduler = worker.scheduler
    keeper = getattr(scheduler, "_queue", None) or getattr(scheduler, "_grants", scheduler)
    return [
        *keeper._waits._waits,
        *keeper._loads._waits,
        *keeper._admission._misfits,
    ]
