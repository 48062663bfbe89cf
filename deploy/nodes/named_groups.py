"""Placement groups that outlive who made them, found again by their names."""

from __future__ import annotations

from typing import Final

from kvrelay.deploy.nodes.local_ray import PlacementGroup, PlacementGroupID, ray

_REMOVED: Final = "REMOVED"


def group_name(namespace: str, worker: str) -> str:
    """The name of the group that was made for this worker, and perhaps others after it.

    Ray knows groups by the namespace of whoever made them, too, so a name has the cluster's in it.
    """
    return f"{namespace}/{worker}"


def find_groups(namespace: str) -> dict[str, PlacementGroup]:
    """A cluster's placement groups, by name. Asks Ray's head, and blocks meanwhile."""
    table = ray.util.placement_group_table()
    return {
        one["name"]: PlacementGroup(PlacementGroupID(bytes.fromhex(one["placement_group_id"])))
        for one in table.values()
        if one["name"].startswith(f"{namespace}/") and one["state"] != _REMOVED
    }
