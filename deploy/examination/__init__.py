"""`kvrelay doctor`: what nodes are like, how fast they read from each other, what to change."""
