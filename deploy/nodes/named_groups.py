"""Placement groups that outlive the process that made them, found again by their names."""

from __future__ import annotations

from typing import Final

from kvrelay.deploy.nodes.local_ray import PlacementGroup, PlacementGroupID, ray

_REMOVED: Final = "REMOVED"


def group_name(namespace: str, worker: str) -> str:
    """Return the name of the group that was made for this worker; later ones may use its places.

    The name contains the cluster's namespace: Ray's own lookup uses the namespace of the process
    that made the group, which may be another one.
    """
    return f"{namespace}/{worker}"


def find_groups(namespace: str) -> dict[str, PlacementGroup]:
    """Return a cluster's placement groups, by name. Blocks while Ray's head is asked."""
    table = ray.util.placement_group_table()
    return {
        one["name"]: PlacementGroup(PlacementGroupID(bytes.fromhex(one["placement_group_id"])))
        for one in table.values()
        if one["name"].startswith(f"{namespace}/") and one["state"] != _REMOVED
    }
