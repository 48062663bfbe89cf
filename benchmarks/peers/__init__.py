"""kvrelay beside vLLM: the same loads, by the same client, in turn."""
