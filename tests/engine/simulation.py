"""Prefill and decode workers under a random scheduler, without threads, network or model.

The engines, roles, state machines and ledgers are the real ones. What is
simulated is what lies between them: when a message arrives, when a forward
ends, when a read ends. The model counts: its next token is a function of the
whole context as it is found in the pages, so a page that was reused too early
gives wrong tokens.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvrelay.aggregated_worker.role import AggregatedRole
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.decode_worker.stream import FromPeer, StreamLost
from kvrelay.decode_worker.stream import HandOverStream as DecodeStream
from kvrelay.engine.commands import (
    Attach,
    Cancel,
    Detach,
    Drain,
    Inbox,
    Peer,
    PeerDied,
    Submit,
)
from kvrelay.engine.computer import Drafter, StepComputer
from kvrelay.engine.config import Role, WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.loading import load_model
from kvrelay.engine.loop import Engine
from kvrelay.engine.memory import make_ledger, tokens_ahead
from kvrelay.engine.metrics import WorkerMetrics
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.outputs import End, EndReason, Output, RequestKey, RouterLink
from kvrelay.engine.step import Step, compute_or_fail
from kvrelay.engine.stop import StopConditions
from kvrelay.engine.tape import Tape
from kvrelay.kv_transfer.checksums import LocalPage, PageSum, hash_bytes
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.ledger import Ledger, PoolShape, window_pages
from kvrelay.mem_cache.radix_tree import RadixTree
from kvrelay.mem_cache.sharing import PageCopy
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.sampler import SampledToken, SamplingRow, choose
from kvrelay.model_runner.sampling_params import SamplingParams
from kvrelay.prefill_worker.request import (
    HandOverStream as PrefillStream,
)
from kvrelay.prefill_worker.request import (
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from kvrelay.prefill_worker.role import PrefillRole

VOCAB = 97
Windows = tuple[int | None, ...]
"""For each pool what its layers look back; None: everything."""
GREEDY = SamplingParams(temperature=0)


FULL: Windows = (None,)


def next_value(contexts: Iterable[Sequence[int] | np.ndarray]) -> int:
    """What the counting model makes of what each pool's layers see."""
    value = 0
    for context in contexts:
        weights = np.arange(len(context), 0, -1) ** 2
        value = value * 31 + len(context) + int(np.dot(context, weights))
    return value % VOCAB


LOGITS = np.random.default_rng(0).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)
"""The counting model's after each value."""


def next_token(tokens: Sequence[int], row: SamplingRow, windows: Windows) -> int:
    """What a plain run says after `tokens`."""
    value = next_value(tokens[-window if window else 0 :] for window in windows)
    token_id = choose(LOGITS[value], row)
    assert isinstance(token_id, int)
    return token_id


def reference(
    prompt: Sequence[int],
    max_tokens: int,
    windows: Windows = FULL,
    sampling: SamplingParams = GREEDY,
    choice: int = 0,
) -> list[int]:
    """The output of an undisturbed run."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        row = SamplingRow(sampling, len(tokens), prompt, tokens[len(prompt) :], choice=choice)
        tokens.append(next_token(tokens, row, windows))
    return tokens[len(prompt) :]


class GuessDrafter:
    """Guesses right as often as it is told to."""

    def __init__(self, seed: int, windows: Windows, right: float = 0.7) -> None:
        self._random = random.Random(seed)
        self._windows = windows
        self._right = right

    def follow(self, batch: ForwardBatch) -> None:
        """Keeps no KV."""

    def propose(self, tapes, rows, counts, page_tables) -> list[list[int]]:
        return [self._guess(*each) for each in zip(tapes, rows, counts, strict=True)]

    def _guess(self, tape: Tape, row: SamplingRow, count: int) -> list[int]:
        tokens = list(tape.token_ids)
        for _ in range(self._random.randint(0, count)):
            guess = next_token(tokens, row.after(tokens[len(tape.token_ids) :]), self._windows)
            right = self._random.random() < self._right
            tokens.append(guess if right else self._random.randrange(VOCAB))
        return tokens[len(tape.token_ids) :]


def drain(stream: Any) -> list[Any]:
    """What the engine has put into a stream; `None` stands for its close."""
    messages = []
    while not stream._queue.empty():
        messages.append(stream._queue.get_nowait())
    return messages


class SimAgent:
    """Reads pages when the simulation says so."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.serving = 0
        self.ordered: list[tuple[Pull, Callable[[Pull], None]]] = []
        self.to_hash: list[tuple[Sequence[LocalPage], Callable[[tuple[PageSum, ...]], None]]] = []

    def hash_pages(self, pages: Any, on_end: Any) -> None:
        self.to_hash.append((pages, on_end))

    def serve(self, change: int) -> None:
        self.serving += change
        assert self.serving >= 0

    def pull(self, peer: str, local: Any, remote: Any, on_end: Callable[[Pull], None]) -> Pull:
        pull = Pull(peer, tuple(local), tuple(remote), PullState.RUNNING)
        self.ordered.append((pull, on_end))
        return pull

    def confirm_death(self, incarnation: str, on_settled: Callable[[], None]) -> None:
        for pull, on_end in [entry for entry in self.ordered if entry[0].peer == incarnation]:
            self.ordered.remove((pull, on_end))
            pull.state = PullState.FAILED
            pull.settle()
            on_end(pull)
        on_settled()


@dataclass(eq=False)
class SimWorker:
    """One worker: the real engine over a pool of integers."""

    name: str
    role_name: Role
    pages: int
    page_size: int
    rows: int
    cached: bool
    windows: Windows
    config: WorkerConfig
    tokenizer: Any = None
    """Only a real model has one."""
    steps: deque[Step] = field(default_factory=deque)
    opened: list[DecodeStream] = field(default_factory=list)
    broken: set[RequestKey] = field(default_factory=set)
    """Requests whose logits are not finite here."""
    draining: bool = False
    """The router knows that it takes no more requests."""
    drained: bool = False

    def __post_init__(self) -> None:
        self.model, self.ledger = self._load()
        self.computer = self.model.computer
        self.agent = SimAgent(self.name)
        self.inbox = Inbox()
        outbox = Outbox(lambda function, *args: function(*args))
        self.core = EngineCore(self.ledger, outbox, WorkerMetrics(self.config))
        if self.role_name is Role.AGGREGATED:
            role = AggregatedRole(self.core, self.tokenizer, self.config)
        elif self.role_name is Role.PREFILL:
            role = PrefillRole(self.core, self.agent, self.inbox, self.tokenizer, self.config)
        else:
            role = DecodeRole(self.core, self.agent, self, self.inbox, self.tokenizer, self.config)
        options = {"overlap": self.config.overlap, "audit_pages": self.config.audit_pages}
        self.engine = Engine(self.core, role, self, **options)
        self.link = RouterLink("router")
        self.inbox.post(Attach(self.link))

    def _load(self) -> tuple[SimModel, Ledger]:
        if self.config.model_path is not None:
            model = RealModel(self.config)
            return model, make_ledger(self.config, model.pools, 512)
        ahead = tokens_ahead(self.config)
        shapes = [self._shape(window, ahead) for window in self.windows]
        ledger = Ledger(
            shapes,
            page_size=self.page_size,
            total_rows=self.rows,
            max_row_tokens=512,
            ahead=ahead,
            index=RadixTree(self.page_size, self.windows) if self.cached else None,
        )
        drafter = GuessDrafter(0, self.windows) if self.config.drafts_for(True) else None
        return CountingModel(shapes, self.page_size, drafter), ledger

    def _shape(self, window: int | None, ahead: int) -> PoolShape:
        """A window pool is tight: two requests fit, and what is left over is cached."""
        if window is None:
            return PoolShape("full", self.pages)
        return PoolShape("window", 2 * window_pages(window, self.page_size, ahead), window)

    def deliver(self, stream: DecodeStream) -> None:
        """As the hand-over client: a stream is to be opened."""
        self.opened.append(stream)

    def launch(self, step: Step) -> None:
        """As the launcher."""
        self.steps.append(step)

    def turn(self) -> None:
        if self.inbox._messages:
            self.engine.turn(self.inbox.drain())

    def drain(self) -> None:
        self.inbox.post(Drain(self._has_drained))

    def _has_drained(self) -> None:
        assert not self.drained
        self.drained = True

    def hash(self) -> None:
        """The hasher's thread is done with its oldest order."""
        pages, on_end = self.agent.to_hash.pop(0)
        on_end(tuple(PageSum(page.place, self.model.sum(page)) for page in pages))

    def end_step(self) -> None:
        step = self.steps.popleft()
        live = [item for item in step.scheduled if item.tape.broken is None]
        self.model.broken = {i for i, item in enumerate(live) if item.request.key in self.broken}
        if step.copies:
            self.computer.copy(step.copies)
        self.inbox.post(self.computer.compute(step))

    def fail_step(self) -> None:
        step, self.model.fails = self.steps.popleft(), True
        ended = compute_or_fail(self.computer, step)
        self.model.fails = False
        self.inbox.post(ended)


def count(worker: SimWorker, counter: str) -> float:
    labels = {"role": worker.role_name, "worker": worker.name, "model": "sim"}
    value = worker.core.metrics.registry.get_sample_value(f"kvrelay_{counter}_total", labels)
    assert value is not None
    return value


class CountingModel:
    """Reads and writes token ids in pages; its logits are sure of `next_token`."""

    def __init__(
        self, shapes: Sequence[PoolShape], page_size: int, drafter: Drafter | None
    ) -> None:
        self.windows = [shape.window for shape in shapes]
        self.page_size = page_size
        self.kv = [np.full((shape.total_pages, page_size), -1, np.int64) for shape in shapes]
        self.broken: set[int] = set()
        """Sequences of the next batch whose logits are not finite."""
        self.fails = False
        self.computer = StepComputer(self, self._copy, drafter)

    def read(self, peer: CountingModel, pull: Pull) -> None:
        """Move one read's bytes as they are on the other side now."""
        pages = zip(self.kv, pull.local_pages, peer.kv, pull.remote_pages, strict=True)
        for kv, local, theirs, remote in pages:
            kv[local] = theirs[remote]

    def sum(self, page: LocalPage) -> int:
        """Of the settled tokens."""
        return hash_bytes(self.kv[page.place.pool][page.page_id, : page.tokens].view(np.uint8))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("injected")
        logits = np.zeros((len(batch.logit_rows), VOCAB), np.float32)
        owners = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
        for index in range(len(batch.seq_lens)):
            self._write(batch, index)
        for row, token in enumerate(batch.logit_rows.tolist()):
            index = int(owners[token])
            seen = self._context(batch, index, int(batch.positions[token]) + 1)
            logits[row] = LOGITS[next_value(seen)]
            if index in self.broken:
                logits[row] = np.nan
        return torch.from_numpy(logits)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self.kv[copy.pool][copy.target] = self.kv[copy.pool][copy.source]

    def _write(self, batch: ForwardBatch, index: int) -> None:
        first, last = batch.query_start[index : index + 2]
        at, ids = batch.positions[first:last], batch.input_ids[first:last]
        for kv, tables in zip(self.kv, batch.page_tables, strict=True):
            pages = tables[index][at // self.page_size]
            # A window need not be there for the tokens that it has passed already.
            kv[pages[pages >= 0], (at % self.page_size)[pages >= 0]] = ids[pages >= 0]

    def _context(self, batch: ForwardBatch, index: int, length: int) -> Iterator[np.ndarray]:
        for kv, tables, window in zip(self.kv, batch.page_tables, self.windows, strict=True):
            seen = np.arange(max(0, length - window) if window else 0, length)
            pages = tables[index][seen // self.page_size]
            assert (pages >= 0).all(), "a page of the window has left"
            yield kv[pages, seen % self.page_size]


class RealModel:
    """A model of a checkpoint, over pools of its own."""

    def __init__(self, config: WorkerConfig) -> None:
        model = load_model(config)
        self.pools, self.computer = model.pools, model.computer
        self.broken: set[int] = set()

    def read(self, peer: RealModel, pull: Pull) -> None:
        """See `CountingModel`."""
        pages = zip(self.pools, pull.local_pages, peer.pools, pull.remote_pages, strict=True)
        for pool, local, theirs, remote in pages:
            copy_pages(theirs, remote, pool, local)


SimModel = CountingModel | RealModel


@dataclass(eq=False)
class SimRequest:
    """A request and what came of it."""

    key: RequestKey
    prompt: list[int]
    max_tokens: int
    priority: int
    arrived: float
    prefill: SimWorker
    decode: SimWorker
    sampling: SamplingParams
    stops: StopConditions
    wanted_prompt_logprobs: int | None = None
    tokens: dict[int, SampledToken] = field(default_factory=dict)
    prompt_logprobs: tuple[SampledToken, ...] = ()
    ends: dict[str, Any] = field(default_factory=dict)
    disturbed: bool = False
    cached_tokens: int = 0
    retractions: int = 0
    decode_drained: bool = False
    """An attempt was given back whose prompt may still have been computed."""

    @property
    def output(self) -> list[int]:
        return [token.token_id for token in self.samples]

    @property
    def samples(self) -> list[SampledToken]:
        """The output's tokens, with the log-probabilities that were asked for."""
        return [self.tokens[index] for index in sorted(self.tokens)]


class Simulation:
    """A cluster under a random but reproducible scheduler."""

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
        **options: Any,
    ) -> None:
        self.random = random.Random(seed)
        options = {"audit_pages": True, "model_path": None, "peer_timeout": math.inf, **options}

        def make(name: str, role: Role) -> SimWorker:
            config = WorkerConfig(
                name, role, model_name="sim", page_size=page_size, chunk_tokens=chunk, **options
            )
            return SimWorker(name, role, pages, page_size, rows, cached, windows, config, tokenizer)

        if aggregated:
            self.prefills = self.decodes = [make(f"a{i}", Role.AGGREGATED) for i in range(workers)]
        else:
            self.prefills = [make(f"p{i}", Role.PREFILL) for i in range(workers)]
            self.decodes = [make(f"d{i}", Role.DECODE) for i in range(workers)]
        self.workers = list(dict.fromkeys([*self.prefills, *self.decodes]))
        self.by_name = {worker.name: worker for worker in self.workers}
        """Those that have left, too."""
        self._make = make
        self.pairs: list[tuple[SimWorker, DecodeStream, SimWorker, PrefillStream]] = []
        self._arrivals = 0
        self.attempts = 0
        self.submitted: list[SimRequest] = []
        self.requests: dict[RequestKey, SimRequest] = {}
        """By attempt."""
        self.pulls: list[Pull] = []
        """Reads that have ended well."""

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        sampling: SamplingParams = GREEDY,
    ) -> SimRequest:
        return self.submit_choices(1, prompt, max_tokens, priority, sampling)[0]

    def submit_choices(
        self,
        choices: int,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        sampling: SamplingParams = GREEDY,
        prompt_logprobs: int | None = None,
        **stops: Any,
    ) -> list[SimRequest]:
        arrived = self.now()
        request_id, place = str(len(self.submitted)), self._place()
        conditions = StopConditions(max_tokens=max_tokens, **stops)
        requests = []
        for choice in range(choices):
            key = RequestKey("router", request_id, 0, choice)
            one = SimRequest(
                key, prompt, max_tokens, priority, arrived, *place, sampling, conditions,
                wanted_prompt_logprobs=prompt_logprobs,
            )  # fmt: skip
            requests.append(one)
        self.submitted += requests
        self._attempt(requests)
        return requests

    def now(self) -> float:
        """Of an arrival."""
        self._arrivals += 1
        return float(self._arrivals)

    def _place(self) -> tuple[SimWorker, SimWorker]:
        """The workers for a request's prompt and for its output; may be the same one."""
        prefill, decode = (
            self.random.choice([worker for worker in workers if not worker.draining])
            for workers in (self.prefills, self.decodes)
        )
        return prefill, prefill if decode in self.prefills else decode

    def _attempt(self, choices: Sequence[SimRequest]) -> None:
        """As a router: submit choices of a request to its workers, with what was emitted."""
        self.attempts += 1
        for one in choices:
            one.key = one.key._replace(attempt=self.attempts)
            one.ends = {}
            self.requests[one.key] = one
        request = choices[0]
        command = Submit(
            request.prefill.link,
            request.key,
            (*request.prompt, *request.output),
            len(request.prompt),
            request.sampling,
            request.stops,
            choices=tuple(one.key.choice for one in choices),
            prompt_logprobs=request.wanted_prompt_logprobs,
            priority=request.priority,
            arrived=request.arrived,
        )
        request.prefill.inbox.post(command)
        if request.decode is not request.prefill:
            peer = Peer("", request.prefill.name)
            request.decode.inbox.post(replace(command, link=request.decode.link, prefill=peer))

    def _disturb(self, key: RequestKey) -> None:
        for one in self.requests.values():
            if one.key.of_choice(0) == key.of_choice(0):
                one.disturbed = True

    def cancel(self, request: SimRequest, worker: SimWorker) -> None:
        self._disturb(request.key)
        worker.inbox.post(Cancel(request.key))

    def break_stream(self) -> None:
        """A hand-over stream is lost under both sides."""
        if self.pairs:
            pair = self.random.choice(self.pairs)
            self._disturb(pair[1].key)
            self._unpair(pair)

    def fail_read(self) -> None:
        """A read fails while its late bytes still arrive: the fence passes later, by death."""
        worker = self.random.choice(self.decodes)
        if worker.agent.ordered:
            entry = self.random.choice(worker.agent.ordered)
            worker.agent.ordered.remove(entry)
            pull, on_end = entry
            pull.state, pull.error = PullState.FAILED, "injected"
            on_end(pull)
            worker.agent.ordered.append((pull, lambda _: None))
            for request in self.submitted:
                if request.prefill.name == pull.peer:
                    request.disturbed = True

    def detach(self, worker: SimWorker) -> None:
        """The router's stream to a worker ends, and a new one comes."""
        for request in self.submitted:
            if worker in (request.prefill, request.decode):
                request.disturbed = True
                self._cancel_other(request, worker)
        worker.inbox.post(Detach(worker.link))
        worker.link = RouterLink("router")
        worker.inbox.post(Attach(worker.link))

    def replace(self, worker: SimWorker) -> SimWorker:
        """A worker that has drained leaves; another one takes its place."""
        assert worker.drained
        assert not worker.core.requests
        assert worker.agent.serving == 0
        worker.ledger.audit_pages()
        successor = self._make(worker.name + "'", worker.role_name)
        self.by_name[successor.name] = successor
        for workers in {id(w): w for w in (self.workers, self.prefills, self.decodes)}.values():
            if worker in workers:
                workers[workers.index(worker)] = successor
        for message in worker.inbox.drain() if worker.inbox._messages else ():
            if isinstance(message, Submit):
                self._lose(worker, message)
        for pair in [pair for pair in self.pairs if worker in (pair[0], pair[2])]:
            self._unpair(pair)
        for decode in self.decodes:
            decode.inbox.post(PeerDied(worker.name))
        return successor

    def _lose(self, worker: SimWorker, command: Submit) -> None:
        """As a router: what was on its way to a worker that has left goes elsewhere."""
        for choice in command.choices:
            request = self.requests[command.key.of_choice(choice)]
            if request.key == command.key.of_choice(choice):
                self._move(request, worker)

    def step(self) -> bool:
        """Let one random thing happen; whether anything could."""
        actions: list[Callable[[], None]] = []
        for worker in self.workers:
            if worker.inbox._messages:
                actions.append(worker.turn)
            if worker.steps and self.can_end_step(worker):
                actions.append(worker.end_step)
            if worker.agent.ordered:
                actions.append(lambda worker=worker: self._read(worker))
            if worker.agent.to_hash:
                actions.append(worker.hash)
            if worker.opened:
                actions.append(lambda worker=worker: self._open(worker))
        actions += [lambda pair=pair: self._carry(pair) for pair in self.pairs if self._ready(pair)]
        if self.slow_forwards:
            slow = [w.end_step for w in self.decodes if w.steps]
            actions = [action for action in actions if action not in slow] or actions
        if not actions:
            return False
        self.random.choice(actions)()
        self._collect()
        return True

    def can_end_step(self, worker: SimWorker) -> bool:
        """Whether a forward that was launched has had time to end."""
        return True

    def on_read(self, worker: SimWorker, pull: Pull) -> None:
        """The bytes of a read have arrived; they can be tampered with."""

    def ended(self, request: SimRequest) -> None:
        """A request has ended on all of its workers."""

    def run(self, limit: int = 200_000) -> None:
        """Until nothing can happen any more."""
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
            worker.ledger.audit_pages()
            for counts in worker.ledger.counts():
                assert counts.free + counts.cached_evictable == counts.total, worker.name
                assert counts.promised == 0, worker.name
            assert not worker.core.requests, worker.name
            assert worker.agent.serving == 0, worker.name

    def _open(self, worker: SimWorker) -> None:
        stream = worker.opened.pop(0)
        prefill = self.by_name[stream.peer.incarnation]
        if prefill not in self.prefills:
            worker.inbox.post(StreamLost(stream, "it has left"))
            return
        other = PrefillStream(stream.key.of_choice(0), worker.name)
        prefill.inbox.post(StreamOpened(other))
        self.pairs.append((worker, stream, prefill, other))

    def _ready(self, pair: Any) -> bool:
        return not (pair[1]._queue.empty() and pair[3]._queue.empty())

    def _carry(self, pair: Any) -> None:
        decode, mine, prefill, theirs = pair
        for message in drain(mine):
            if message is None:
                self._unpair(pair)
                return
            prefill.inbox.post(StreamMessage(theirs, message))
        for message in drain(theirs):
            decode.inbox.post(FromPeer(mine, message))

    def _unpair(self, pair: Any) -> None:
        decode, mine, prefill, theirs = pair
        self.pairs.remove(pair)
        prefill.inbox.post(StreamClosed(theirs))
        decode.inbox.post(StreamLost(mine, "closed"))

    def _read(self, worker: SimWorker) -> None:
        """Move one read's bytes as they are on the other side now, and end it."""
        entry = self.random.choice(worker.agent.ordered)
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

    def _collect(self) -> None:
        for worker in self.workers:
            for step in drain(worker.link):
                if step.load is not None:
                    worker.draining = step.load.draining
                for output in step.outputs:
                    self._take(worker, output)

    def _take(self, worker: SimWorker, output: Output) -> None:
        request = self.requests[output.key]
        if output.key != request.key:
            late = worker.role_name is Role.PREFILL and request.decode_drained
            assert not output.tokens or late, "an attempt that was given back goes on"
            return
        for offset, token in enumerate(output.tokens):
            assert output.index + offset not in request.tokens, "a token was said twice"
            request.tokens[output.index + offset] = token
        request.prompt_logprobs += output.prompt_logprobs
        request.cached_tokens += output.cached_tokens
        if output.end is not None and self._moves(request, output.end):
            self._move(request, worker)
        elif output.end is not None:
            assert worker.name not in request.ends, "a worker ended a request twice"
            request.ends[worker.name] = output.end
            if request.ends.keys() >= {request.prefill.name, request.decode.name}:
                self.ended(request)
            if output.end.reason in (EndReason.ABORTED, EndReason.FAILED):
                self._cancel_other(request, worker)

    def _moves(self, request: SimRequest, end: End) -> bool:
        """Whether another attempt is to go on, at no cost."""
        drains = request.prefill.draining or request.decode.draining
        return end.reason is EndReason.RETRACTED or (end.cause is not None and drains)

    def _move(self, request: SimRequest, worker: SimWorker) -> None:
        """As a router: `worker` is out, so another attempt goes on."""
        if request.prefill is not request.decode:
            self._cancel_other(request, worker)
        if len(request.output) == request.max_tokens:
            return  # the prefill side has said all that there is to say
        request.retractions += 1
        request.decode_drained |= request.decode.draining
        request.prefill, request.decode = self._place()
        self._attempt([request])

    def _cancel_other(self, request: SimRequest, worker: SimWorker) -> None:
        """As a router does when one of a request's two workers is out."""
        other = request.decode if worker is request.prefill else request.prefill
        if other.name not in request.ends:
            other.inbox.post(Cancel(request.key))
