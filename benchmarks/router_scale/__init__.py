"""What a router costs with a thousand workers, on one core: see `__main__`."""
