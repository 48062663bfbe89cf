"""The kit for a machine with a GPU and no network: what travels there, and the stages there."""
