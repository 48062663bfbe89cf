"""One incarnation of a worker, as its supervisor watches it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, Final

from kvrelay.deploy.bounded_waits import is_done_within
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.controller.supervision.watcher import Watcher
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_actor import WorkerActor, reason_of
from kvrelay.deploy.nodes.worker_end import WorkerEnd, ended_by_memory_monitor
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.deploy.nodes.worker_process import WorkerProcess
from kvrelay.engine.worker.worker_lease import StaleEpochError
from kvrelay.wire.worker_info import WorkerInfo

_log = logging.getLogger(__name__)
_TELL_AGAIN_SECONDS: Final = 0.2
_TELL_WHY_SECONDS: Final = 2.0


class Incarnation:
    """One process of a worker under observation: its end is noticed, however it comes, and proven.

    Args:
        started: the incarnation's report of its start; it may have died since.
        actor: the worker's actor.
        silence_seconds: the time without an answer after which the process is killed.
        leases: the controller's leases; the worker's is renewed with every sign of life.
        watcher: is told when the worker drains, and gives it its turn to drain.
    """

    def __init__(
        self,
        started: Started,
        actor: WorkerActor,
        silence_seconds: float,
        leases: Leases,
        watcher: Watcher,
    ) -> None:
        self.info = started.info
        self._node = started.node
        self._actor = actor
        self._silence_seconds = silence_seconds
        self._leases = leases
        self._watcher = watcher
        self.cause = WorkerEnd.LOST
        """The cause of its end, as far as it is known."""
        self._killed = False
        self._stamp: float | None = None
        """The worker's stamp for the next renewal; a false alarm does not lose it."""
        self._identity = started.process
        """The identity of the process on its machine, if the worker can tell it."""
        self._process = None if self._identity is None else WorkerProcess.find(self._identity)
        """The process; None: it cannot be observed from here."""
        self._call: asyncio.Task[str] | None = None
        """The call that lasts until Ray has noticed the end of the process."""
        leases.heard(self.info.incarnation, leases.clock())

    async def tell_to_drain(self) -> None:
        """Let the worker drain; return at once if its process has ended instead.

        Raises RayError if the call fails; the worker may drain all the same.
        """
        give_up_at = time.monotonic() + self._silence_seconds
        while True:
            try:
                await self._actor.call(WorkerHost.begin_drain, self.info.incarnation)
            except ray.exceptions.ActorUnavailableError:
                if self._process is not None and self._process.has_ended:
                    return
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(_TELL_AGAIN_SECONDS)
            except ray.exceptions.RayActorError:
                return  # it had nothing to finish, and ended before it could answer
            else:
                return

    async def answers(self) -> bool:
        """Ask a worker that another controller has started whether it still runs.

        If it does, it follows this controller from now on.
        """
        incarnation, leases = self.info.incarnation, self._leases
        renewal = leases.renew(incarnation, self._stamp, leases.clock())
        heartbeat = self._actor.call(WorkerHost.heartbeat, incarnation, renewal)
        answer = asyncio.create_task(heartbeat)
        try:
            if await is_done_within(answer, self._silence_seconds):
                self._stamp = answer.result()
            return self._stamp is not None
        except ray.exceptions.RayError as error:
            _log.info("%s: %s", incarnation, reason_of(error))
            return False
        finally:
            answer.cancel()

    async def lost(self) -> str:
        """Wait until the process has ended, is unreachable, or was killed; return why."""
        if self._call is not None:
            self._call.cancel()
        self._call = asyncio.create_task(self._call_ended())
        signs = [
            asyncio.create_task(self._silent()),
            asyncio.create_task(self._process_ended()),
            self._call,
        ]
        others = [
            asyncio.create_task(other)
            for other in (
                self._notice_drain(),
                self._drain_for_old_quarantine(),
                self._hear_last_word(),
            )
        ]
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            return next(sign.result() for sign in signs if sign.done())
        finally:
            await _cancel(*signs[:2], *others)

    async def has_died(self) -> bool:
        """Wait until a lost incarnation provably serves no more, or answers again.

        Where the process cannot be observed, the worker's next process may see its end. Otherwise
        the end of its lease is the proof: it then serves no more. A drained incarnation had stopped
        serving before it reported so. Returns False if it answers again.
        """
        process = self._process
        if process is None and self.cause is WorkerEnd.DRAINED:
            return True
        if process is not None and (process.has_ended or self._killed):
            await process.ended()  # nobody is left who could answer
            return True
        asking = self._actor.ask_who_it_is(seconds=self._silence_seconds)
        if process is None:
            return await self._has_left(asking)
        ended, answer = asyncio.create_task(process.ended()), asyncio.create_task(asking)
        try:
            await asyncio.wait({ended, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and answer.result() != self.info:
                # Ray has made another process, so nobody ends this one if it still runs.
                process.kill()
                await ended
            return ended.done()
        finally:
            await _cancel(ended, answer)

    async def _has_left(self, asking: Coroutine[Any, Any, WorkerInfo | None]) -> bool:
        """Do the work of `has_died` for a process that cannot be observed from here."""
        over, answer = asyncio.create_task(self._lease_over()), asyncio.create_task(asking)
        try:
            await asyncio.wait({over, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and answer.result() == self.info:
                return False
            if not over.done() and not await self._was_seen_to_end():
                await over
            return True
        finally:
            await _cancel(over, answer)

    async def _was_seen_to_end(self) -> bool:
        """Let the worker's next process end this one, if it is on the same machine."""
        if self._identity is None:
            return False
        ending = asyncio.create_task(self._actor.call(WorkerHost.end_process, self._identity))
        try:
            with contextlib.suppress(ray.exceptions.RayError):
                return await is_done_within(ending, self._silence_seconds) and ending.result()
            return False
        finally:
            ending.cancel()

    async def _lease_over(self) -> None:
        """Wait until the lease, which nothing renews meanwhile, has surely run out."""
        incarnation = self.info.incarnation
        await asyncio.sleep(self._leases.over_at(incarnation) - self._leases.clock())
        await self._leases.until_over(incarnation)

    async def until_ray_knows(self) -> None:
        """Wait until Ray has noticed the end as well: an earlier call takes seconds longer."""
        if self._call is not None:
            await is_done_within(self._call, self._silence_seconds)

    async def why(self, seen: str) -> str:
        """Return why the process has ended: as Ray tells, if Ray itself has ended it.

        Args:
            seen: the reason that was seen from here.
        """
        incarnation, found = self.info.incarnation, ""
        try:
            async with asyncio.timeout(_TELL_WHY_SECONDS):
                found = await asyncio.to_thread(ended_by_memory_monitor, self._node, self.info.pid)
        except Exception as error:  # Ray's tables have no promised form
            _log.info("%s: Ray does not tell why it ended: %s", incarnation, error)
        if found:
            _log.error("%s has died: %s", incarnation, found)
        return found or seen or "it was not found by a new controller"

    def close(self) -> None:
        """Stop observing the process."""
        self._leases.forget(self.info.incarnation)
        if self._call is not None:
            self._call.cancel()
        if self._process is not None:
            self._process.close()

    async def end(self, seconds: float) -> None:
        """Kill the process, if it can be observed, and wait at most `seconds` for its end."""
        if self._process is not None:
            await self._process.end(seconds)
        self.close()

    async def _silent(self) -> str:
        """Wait until the worker no longer answers, then kill its process; return the reason.

        This also ends a process that was suspended. The lease is renewed as long as it answers.
        """
        incarnation = self.info.incarnation
        lease_seconds = self._leases.times.worker_seconds
        while True:
            renewal = self._leases.renew(incarnation, self._stamp, self._leases.clock())
            heartbeat = self._actor.call(WorkerHost.heartbeat, incarnation, renewal)
            answer = asyncio.create_task(heartbeat)
            try:
                if not await is_done_within(answer, self._silence_seconds):
                    self._kill()
                    return f"it has not answered for {self._silence_seconds:g} s, so it is killed"
                self._stamp = answer.result()
            except ray.exceptions.RayError as error:
                if not isinstance(getattr(error, "cause", None), StaleEpochError):
                    return reason_of(error)
                _log.error("%s follows another controller: %s", incarnation, reason_of(error))
                self._leases.give_up()
            finally:
                answer.cancel()
            await asyncio.sleep(min(self._silence_seconds / 3, lease_seconds / 4))

    async def _process_ended(self) -> str:
        """Wait until the system reports the end of the process; return the reason."""
        if self._process is None:
            await asyncio.Event().wait()
        else:
            await self._process.ended()
        return "its process died"

    async def _call_ended(self) -> str:
        """Wait for the end of a call that lasts as long as the process; return the reason."""
        try:
            await self._actor.call(WorkerHost.watch, self.info.incarnation)
        except ray.exceptions.RayError as error:
            return reason_of(error)
        return "another process has taken its place"

    async def _notice_drain(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            if await self._actor.call(WorkerHost.draining, self.info.incarnation):
                self._watcher.worker_draining(self.info)

    async def _drain_for_old_quarantine(self) -> None:
        """Let the worker drain, in its turn, when its memory is in quarantine for too long."""
        incarnation = self.info.incarnation
        try:
            while await self._actor.call(WorkerHost.quarantine_too_old, incarnation):
                async with self._watcher.turn_to_drain(self.info):
                    if await self._actor.call(WorkerHost.drain_if_quarantine_too_old, incarnation):
                        self._watcher.worker_draining(self.info)
                        return
        except ray.exceptions.RayActorError as error:
            _log.info("%s: %s", incarnation, reason_of(error))  # it is about to be found lost
        except ray.exceptions.RayError as error:
            _log.error("%s cannot drain for its quarantine: %s", incarnation, reason_of(error))

    async def _hear_last_word(self) -> None:
        """Learn why the process is about to end by itself; it waits until the cause was heard."""
        with contextlib.suppress(ray.exceptions.RayError):
            incarnation = self.info.incarnation
            self.cause = await self._actor.call(WorkerHost.last_word, incarnation)
            await self._actor.call(WorkerHost.last_word_heard, incarnation)

    def _kill(self) -> None:
        self._killed, self.cause = True, WorkerEnd.SILENT
        if self._process is not None:
            self._process.kill()
        else:
            self._actor.restart()


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
