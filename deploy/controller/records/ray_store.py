"""A cluster's store in Ray's own key-value store, which only ends with Ray's head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self, TypeVar

from kvrelay.deploy.controller.records.key_value_store import StoreError
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.local_ray import ray

T = TypeVar("T")
_CALL_SECONDS: Final = 5.0
"""The time that the head has to answer a call."""


class RayStore:
    """A `KeyValueStore` whose keys are separate for each cluster.

    Args:
        client: the client of Ray's head.
        namespace: the cluster's namespace.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._namespace = namespace.encode()
        # One: calls stay in order, and one that hangs holds one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @classmethod
    def of_this_process(cls, namespace: str) -> Self:
        """Make the store in the Ray that this process is connected to."""
        return cls(ray._private.worker.global_worker.gcs_client, namespace)

    async def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none."""
        name = key.encode()
        call = self._client.internal_kv_get
        value: bytes | None = await self._run(
            lambda: call(name, self._namespace, timeout=_CALL_SECONDS)
        )
        return value

    async def put(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        await self._put(key, value, overwrite=True)

    async def put_new(self, key: str, value: bytes) -> bool:
        """Set a key's value if it has none; return whether it had none.

        It also returns False if Ray repeated the call itself because the first answer was lost.
        """
        return await self._put(key, value, overwrite=False) == 1

    async def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        name = key.encode()
        call = self._client.internal_kv_del
        await self._run(lambda: call(name, False, self._namespace, timeout=_CALL_SECONDS))

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with the prefix."""
        name = prefix.encode()
        call = self._client.internal_kv_keys
        found: list[bytes] = await self._run(
            lambda: call(name, self._namespace, timeout=_CALL_SECONDS)
        )
        return [key.decode() for key in found]

    async def _put(self, key: str, value: bytes, *, overwrite: bool) -> int:
        """Set a key's value; return the number of new keys: 0 or 1."""
        name = key.encode()
        call = self._client.internal_kv_put
        return await self._run(
            lambda: call(name, value, overwrite, self._namespace, timeout=_CALL_SECONDS)
        )

    async def _run(self, call: Callable[[], T]) -> T:
        """Run a blocking call. Raises StoreError if it fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (ray.exceptions.RayError, OSError) as error:
            raise StoreError(" ".join(str(error).split())) from error


def read_once(head: str, namespace: str, key: str) -> bytes | None:
    """Return the value of a key, in a process outside any Ray. Blocks. Raises ClusterError.

    Args:
        head: the ``host:port`` of Ray's head, which has just answered.
        namespace: the cluster's namespace.
        key: the key.
    """
    try:
        client = ray._raylet.GcsClient(address=head)
        value: bytes | None = client.internal_kv_get(
            key.encode(), namespace.encode(), timeout=_CALL_SECONDS
        )
    except (ray.exceptions.RayError, OSError) as error:
        raise ClusterError(f"the Ray at {head}: {' '.join(str(error).split())}") from error
    return value
