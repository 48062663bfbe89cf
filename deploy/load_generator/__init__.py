"""Sends requests to a server as clients would, and reports what they got: `kvrelay bench`."""
