"""The copying of a checkpoint to the nodes of a Ray cluster: in pieces, checked by digest.

Each node gets it at most once.

The process that starts the cluster has a `ModelSource` beside it: an actor that reads pieces of
files on request. What it returns goes through Ray's object store and is freed when it is written,
so neither side holds more than a few pieces.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvrelay.deploy.errors import ModelError
from kvrelay.deploy.nodes.converted import locked, made_aside, sha256_of
from kvrelay.deploy.nodes.local_ray import NodeAffinitySchedulingStrategy, ray
from kvrelay.deploy.nodes.models import CHECKPOINT_FILES, ModelFolder
from kvrelay.deploy.nodes.ray_places import check_name_is_free, name_is_taken
from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.deploy.start_progress import StartProgress

SOURCE: Final = "model-source"
"""The actor's name, in the cluster's namespace."""
PIECE_BYTES: Final = 16 << 20
_AHEAD: Final = 2
"""The number of pieces that are requested ahead of the one being written."""

Files = Mapping[str, str]
"""The sha256 of each file of a checkpoint, by the file's name."""
Checkpoint = tuple[Path, Files]
"""A checkpoint's folder and its files."""


def files_of(checkpoint: Path) -> Files:
    """Return the files that make up a checkpoint. Reads all of them."""
    names = (path.name for path in sorted(checkpoint.iterdir()) if path.is_file())
    wanted = (name for name in names if any(fnmatch.fnmatch(name, one) for one in CHECKPOINT_FILES))
    return {name: sha256_of(checkpoint / name) for name in wanted}


def with_digests(model: ModelFolder, progress: StartProgress) -> ModelFolder:
    """Return the model with the digests of its files, by which nodes recognise a copy."""
    with progress.step("model", f"{model.name}: reading its digests") as step:
        files = files_of(model.path)
        drafts = {} if model.draft_path is None else files_of(model.draft_path)
        step.say("nodes that lack it get a copy")
    return replace(model, files=files, draft_files=drafts)


def checkpoints_of(model: ModelFolder) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of a model that has the digests of its files."""
    draft = () if model.draft_path is None else ((model.draft_path, model.draft_files),)
    return ((model.path, model.files), *draft)


class ModelSource:
    """The actor that reads checkpoints on the machine of the command that has found them.

    Args:
        checkpoints: the folders by the digest of their `Files`; no other folder is read.
    """

    def __init__(self, checkpoints: Mapping[str, Path]) -> None:
        self._checkpoints = checkpoints

    def piece(self, digest: str, name: str, offset: int) -> bytes:
        """Return at most `PIECE_BYTES` of a file; empty at its end."""
        with (self._checkpoints[digest] / Path(name).name).open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)

    def process(self) -> ProcessIdentity | None:
        """Return this process's identity on its machine; None where the system does not tell it."""
        return ProcessIdentity.of_this_process()


@contextmanager
def offering(*checkpoints: Checkpoint) -> Iterator[None]:
    """Open a context in which every node can copy these checkpoints from this machine.

    Raises ClusterError if another cluster of this name runs, whether it offers checkpoints or not.
    """
    check_name_is_free()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    placed = ray.remote(ModelSource).options(
        name=SOURCE, num_cpus=0, max_restarts=-1, scheduling_strategy=here
    )
    try:
        source = placed.remote({digest_of(files): path for path, files in checkpoints})
    except ValueError as error:  # an actor has its name
        raise name_is_taken() from error
    try:
        yield
    finally:
        ray.kill(source)


def offer_for_good(namespace: str, *checkpoints: Checkpoint) -> None:
    """Let every node copy these checkpoints from this machine, until the cluster ends."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    placed = ray.remote(ModelSource).options(
        name=SOURCE,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=here,
    )
    placed.remote({digest_of(files): path for path, files in checkpoints})


def digest_of(files: Files) -> str:
    """Return a checkpoint's name in caches: the digest of its files' names and digests."""
    lines = "".join(f"{digest} {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def local_copy(path: Path, files: Files, cache: Path) -> Path:
    """Return a folder with these files on this node: the checkpoint's path, or a copy in the cache.

    Blocks while they are copied; if several workers need the copy, one makes it and the others
    wait.

    Args:
        path: the checkpoint's path on the node that it comes from.
        files: the files that must be there.
        cache: a folder on this node.

    Raises:
        ModelError: the copy has other digests, or no process offers the checkpoint.
        OSError: the copy cannot be written, mostly because the disk is full.
    """
    if _is_there(path, files):
        return path
    digest = digest_of(files)
    folder = cache / f"{path.name}-{digest[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        if not _is_there(folder, files):
            _fetch(folder, digest, files)
    return folder


def _is_there(folder: Path, files: Files) -> bool:
    try:
        return all(sha256_of(folder / name) == digest for name, digest in files.items())
    except OSError:
        return False


def _fetch(folder: Path, digest: str, files: Files) -> None:
    try:
        source = ray.get_actor(SOURCE)
    except ValueError as error:
        raise ModelError(f"--model: nobody offers {folder.name} to this node any more") from error
    with made_aside(folder) as made:
        made.mkdir()
        for name, expected in files.items():
            with (made / name).open("wb") as file:
                for piece in _pieces(source, digest, name):
                    file.write(piece)
            if sha256_of(made / name) != expected:
                raise ModelError(f"--model: {name} has changed since the cluster was started")


def _pieces(source: Any, digest: str, name: str) -> Iterator[bytes]:
    """Yield the pieces of a file in order, some requested ahead."""
    asked: deque[Any] = deque()
    offset = 0
    while True:
        while len(asked) <= _AHEAD:
            asked.append(source.piece.remote(digest, name, offset))
            offset += PIECE_BYTES
        piece: bytes = ray.get(asked.popleft())
        if not piece:
            return
        yield piece
