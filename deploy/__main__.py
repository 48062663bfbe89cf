"""`python -m kvrelay.deploy` is `kvrelay`."""

from kvrelay.deploy.cli import main

main(prog_name="kvrelay")
