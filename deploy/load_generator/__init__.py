"""The load generator of `kvrelay bench`: it sends requests as clients do, and reports results."""
