"""The choice of nodes for a role's workers so that pairs are near each other (`--near`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.options.machine_options import Nodes, Spread


@dataclass(frozen=True, slots=True)
class Crowd:
    """Workers of one role that are to be placed together."""

    count: int
    needs: Mapping[str, float]
    """The amounts that one worker takes of each resource that Ray counts."""
    nodes: Nodes
    spread: Spread
    with_others: float = 1.0
    """The number of workers that should have room where one of them is, itself included."""
    partners: Nodes = field(default_factory=Nodes)
    """The nodes for the other role's workers, which these are to be near to."""


def labels_near(label: str, crowd: Crowd, others: Iterable[str]) -> list[dict[str, str]]:
    """Return the labels of the nodes for each worker, one value of `label` among them. Blocks.

    A worker for which no value has room may be placed anywhere.

    Args:
        label: the label whose values say which nodes are near each other.
        crowd: the workers.
        others: the node ids of the workers that they are to be near to, one for each.
    """
    values = {node["NodeID"]: (node.get("Labels") or {}).get(label, "") for node in ray.nodes()}
    taken = Counter(value for one in others if (value := values.get(one, "")))
    may_have = {values[node["NodeID"]] for node in ray.nodes() if _fits(node, crowd.partners)}
    chosen = choose_values(_rooms(label, crowd), taken, may_have, crowd)
    return [dict(crowd.nodes.labels) | ({label: value} if value else {}) for value in chosen]


def choose_values(
    rooms: Mapping[str, list[int]], others: Mapping[str, int], may_have: Set[str], crowd: Crowd
) -> list[str]:
    """Return the label's value for each worker of a role; empty where none has room.

    The first role's workers go where there is most room for all roles. A later role's workers are
    spread in proportion to those that run already.

    Args:
        rooms: the number of this role's workers for which each node has room, by value.
        others: the number of the other role's running workers, by value.
        may_have: the values of nodes where workers of the other role may run.
        crowd: the workers.
    """
    if crowd.spread is Spread.STRICT_PACK:
        whole = {value: float(max(on) // crowd.count) for value, on in rooms.items()}
        return _choose(whole, others, may_have, replace(crowd, count=1)) * crowd.count
    one_a_node = crowd.spread is Spread.STRICT_SPREAD
    left = {
        value: float(sum(min(room, 1) if one_a_node else room for room in on))
        for value, on in rooms.items()
    }
    if others or one_a_node:
        crowd = replace(crowd, with_others=1.0)
    return _choose(left, others, may_have, crowd)


def _choose(
    left: dict[str, float], others: Mapping[str, int], may_have: Set[str], crowd: Crowd
) -> list[str]:
    own: Counter[str] = Counter()

    def worth(value: str) -> tuple[float, ...]:
        packed = own[value] if crowd.spread is Spread.PACK else 0
        return (others.get(value, 0) / (own[value] + 1), value in may_have, packed, left[value])

    chosen = []
    for _ in range(crowd.count):
        having = sorted(value for value in left if left[value] >= 1)
        best = max(having, key=worth, default="")
        if best:
            own[best] += 1
            left[best] -= crowd.with_others
        chosen.append(best)
    return chosen


def _rooms(label: str, crowd: Crowd) -> dict[str, list[int]]:
    """Return the number of workers for which each node has room, by the label's value."""
    free = ray._private.state.available_resources_per_node()
    rooms: dict[str, list[int]] = {}
    for node in ray.nodes():
        value = (node.get("Labels") or {}).get(label, "")
        if value and _fits(node, crowd.nodes):
            rooms.setdefault(value, []).append(_room(free.get(node["NodeID"], {}), crowd.needs))
    return rooms


def _fits(node: Mapping[str, Any], wanted: Nodes) -> bool:
    return node["Alive"] and wanted.labels.items() <= (node.get("Labels") or {}).items()


def _room(free: Mapping[str, Any], needs: Mapping[str, float]) -> int:
    return min((int(free.get(key, 0) / amount) for key, amount in needs.items()), default=0)
