"""The served model: workers with another one, or of another version, get no requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo

_log = logging.getLogger(__name__)


class ServedModel:
    """The choice of the served model, from the models that workers have loaded.

    It is the model of the first worker whose tokenizer is the router's own. It changes only when no
    worker that has it is left, not even one that drains or is being replaced. So the replacement of
    a checkpoint, worker by worker, changes the model once.
    """

    def __init__(self) -> None:
        self.tokenizer = ""
        """The SHA-256 of the router's own tokenizer; set before the first `update`."""
        self.digest: ModelDigest | None = None
        """The served model's digest; None before the first worker."""
        self._refusals: dict[str, str] = {}

    @property
    def name(self) -> str:
        """One hash over the whole model; empty before the first worker."""
        return self.digest.name if self.digest else ""

    @property
    def refusals(self) -> Sequence[str]:
        """Why workers get no requests, one sentence for each such worker."""
        return list(self._refusals.values())

    def is_loaded_by(self, worker: WorkerInfo) -> bool:
        """Whether a worker, listed or not, has loaded the served model."""
        return worker.model == self.digest

    def refusal_of(self, incarnation: str) -> str:
        """Why a listed worker gets no requests; empty: it gets some."""
        return self._refusals.get(incarnation, "")

    def update(self, listed: Sequence[WorkerInfo], awaited: Iterable[WorkerInfo]) -> None:
        """Decide again, for the listed workers and those that are being replaced."""
        of_our_version = [one for one in (*listed, *awaited) if one.version == VERSION]
        self._choose([one.model for one in of_our_version])
        before = self._refusals
        self._refusals = {one.incarnation: why for one in listed if (why := self._refuse(one))}
        for incarnation, why in self._refusals.items():
            if before.get(incarnation) != why:
                _log.error("%s. It gets no requests", why)

    def _choose(self, models: Iterable[ModelDigest]) -> None:
        models = [one for one in models if one.tokenizer == self.tokenizer]
        if not models or self.digest in models:
            return
        if self.digest is not None:
            _log.warning("the served model is %s from now on, not %s", models[0].name, self.name)
        self.digest = models[0]

    def _refuse(self, info: WorkerInfo) -> str:
        if info.version != VERSION:
            theirs = info.version or "an earlier version"
            return f"{info.incarnation} is of {theirs}, this router of {VERSION}"
        loaded = f"{info.incarnation} has loaded model {info.model.name}"
        if info.model.tokenizer != self.tokenizer:
            theirs, own = info.model.tokenizer[:12], self.tokenizer[:12]
            return f"{loaded}, whose tokenizer ({theirs}) is not the router's ({own})"
        if self.digest is not None and (difference := info.model.difference_from(self.digest)):
            return f"{loaded}, not {self.name}, which is served: {difference}"
        return ""
