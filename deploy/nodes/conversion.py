"""The conversion of a GGUF file into a checkpoint folder, here or in a process that can be ended.

As a program it converts one file, and ends when its standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Lock, Thread
from typing import Final

from kvrelay.deploy.errors import ModelError

_REFUSED: Final = 3
"""The exit status of a process that has printed why the file cannot be converted."""


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Fill `folder` with the checkpoint in a GGUF file.

    Raises model_runner's CheckpointError for a file that is not a usable one.
    """
    # Not at the top: torch takes seconds, and a cached model needs none of it.
    from transformers.utils import logging

    from kvrelay.model_runner.checkpoint.gguf_import import convert_gguf

    logging.disable_progress_bar()
    convert_gguf(source, folder, dtype)


class ConversionProcess:
    """A process for each conversion, which `stop` ends in the middle of it.

    A thread of this process could not be stopped: if the interpreter ends while torch computes on
    one, the process is aborted.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def convert(self, source: Path, folder: Path, dtype: str) -> None:
        """Do what the function of this name does. Raises ModelError, and that when stopped, too."""
        with self._lock:
            if self._stopped:
                raise ModelError(f"{source.name} is not converted: the command ends")
            # In a session of its own, as Ctrl-C of a terminal would print a traceback.
            self._process = process = subprocess.Popen(  # noqa: S603 (this module)
                [sys.executable, "-P", "-m", __name__, source, folder, dtype],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        with process:
            assert process.stdout is not None
            said = process.stdout.read().decode(errors="replace").strip()
            status = process.wait()
        if status == _REFUSED:
            raise ModelError(said)
        if status:
            raise ModelError(f"{source.name} was not converted: its process ended with {status}")

    def stop(self) -> bool:
        """End the conversion that runs, and begin no other; return whether there was one."""
        with self._lock:
            self._stopped = True
            if self._process is None or self._process.poll() is not None:
                return False
            self._process.kill()
            return True


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _main(source: str, folder: str, dtype: str) -> None:
    from kvrelay.model_runner.errors import CheckpointError

    Thread(target=_end_with_parent, daemon=True).start()
    try:
        convert(Path(source), Path(folder), dtype)
    except (CheckpointError, OSError) as error:
        sys.stdout.write(str(error))
        sys.exit(_REFUSED)


if __name__ == "__main__":
    _main(*sys.argv[1:])
