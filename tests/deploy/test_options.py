from __future__ import annotations

import os

import pytest

from kvrelay.deploy.address import Address
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.options import PAGE_ORDERS, ServeOptions
from kvrelay.mem_cache.geometry import PageOrder

BAD = [
    ("prefill", 0),
    ("decode", -1),
    ("page_size", 0),
    ("kv_memory", 0),
    ("max_running", 0),
    ("chunk_tokens", 0),
    ("max_model_len", 0),
    ("threads", 0),
    ("default_max_tokens", 0),
    ("max_live_requests", 0),
    ("page_order", "sideways"),
    ("dtype", "int4"),
    ("device", "tpu"),
    ("model", ""),
    ("model_name", "  "),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_names_its_option(field: str, value: object):
    option = "--" + field.replace("_", "-")
    with pytest.raises(OptionError, match=f"^{option}: must") as caught:
        ServeOptions(**{field: value})
    assert caught.value.option == option


@pytest.mark.parametrize("option", ["grpc", "metrics"])
def test_plain_text_beyond_the_machine_needs_insecure(option: str):
    reachable = {option: Address("0.0.0.0", 1234)}
    with pytest.raises(OptionError, match=f"^--{option}: .*--insecure"):
        ServeOptions(**reachable)
    ServeOptions(**reachable, insecure=True)


def test_the_cores_are_shared_out_but_every_worker_has_a_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert ServeOptions().threads_per_worker() == 4
    assert ServeOptions(prefill=2).threads_per_worker() == 2
    assert ServeOptions(prefill=8, decode=8).threads_per_worker() == 1
    assert ServeOptions(prefill=8, threads=3).threads_per_worker() == 3


def test_page_orders_are_those_of_the_pool():
    # Spelled twice, so that `kvrelay --help` need not import torch.
    assert set(PAGE_ORDERS) == {order.value for order in PageOrder}
