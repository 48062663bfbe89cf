"""Prefill and decode workers under a random scheduler, without threads, network or model.

The engines, schedulers, state machines and KV caches are the real ones. What is
simulated is what lies between them: when a message arrives, when a forward
ends, when a read ends. The model counts: its next token is a function of the
whole context as it is found in the pages, so a page that was reused too early
gives wrong tokens.
"""

from tests.engine.simulation.cluster import Simulation
from tests.engine.simulation.model import reference
from tests.engine.simulation.router import SimRequest
from tests.engine.simulation.worker import SimWorker, count

__all__ = ["SimRequest", "SimWorker", "Simulation", "count", "reference"]
