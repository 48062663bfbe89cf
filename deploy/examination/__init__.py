"""`kvrelay doctor`: the nodes' facts, their transfer speeds, and advice on what to change."""
