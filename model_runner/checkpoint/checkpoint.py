"""A model's weights on disk: safetensors, in one file or in shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.digest import WeightsDigest
from kvrelay.model_runner.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old Llama checkpoints carry the frequencies, which the configuration already says."""


class Checkpoint:
    """Tensors by name, read from disk when taken.

    Args:
        folder: holds model.safetensors, or an index and its shards.
        dtype: what taken tensors are cast to.
        device: where they are put.
        on_read: called with the size of each tensor that was read, in bytes.

    Raises:
        CheckpointError: one line that names the file, and the tensor where
            there is one, for whatever is missing, misshapen or corrupt.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._on_read = on_read
        self._files = self._locate()
        self._taken: set[str] = set()
        self._digest = WeightsDigest()

    @property
    def digest(self) -> str:
        """The hash of all tensors that were taken, as they were handed out."""
        return self._digest.hexdigest()

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor `name`."""
        return name in self._files

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor `name`, which must be floating point and of exactly `shape`.

        Cast to `dtype`, where one is given, instead of the others'. It is a copy: what changes in
        the file later changes nothing here.
        """
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} is not readable: {error}") from None
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, not floating point")
        self._taken.add(name)
        # safetensors maps the file: without a copy, who writes into it changes loaded weights.
        loaded = tensor.to(self._device, dtype or self._dtype, copy=True)
        self._digest.add(name, loaded)
        self._on_read(tensor.nbytes)
        return loaded

    def skip(self, name: str) -> None:
        """Declare that `name`, if it is there, is rightly not used."""
        self._taken.add(name)

    def finish(self) -> None:
        """Refuse tensors that nobody took: a bias that is left out makes a different model."""
        left = [
            name
            for name in sorted(self._files.keys() - self._taken)
            if not name.endswith(_IGNORED_SUFFIX)
        ]
        if left:
            raise CheckpointError(
                f"{self._files[left[0]]}: tensor {left[0]} has no place in this architecture"
                + (f" (nor have {len(left) - 1} more)" if len(left) > 1 else "")
            )

    def _locate(self) -> dict[str, Path]:
        single = self._folder / SINGLE_NAME
        if single.exists():
            return dict.fromkeys(_tensor_names(single), single)
        if not (self._folder / INDEX_NAME).exists():
            raise CheckpointError(f"{self._folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return self._locate_shards(ConfigFile.read(self._folder / INDEX_NAME))

    def _locate_shards(self, index: ConfigFile) -> dict[str, Path]:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise index.error("weight_map", "must map tensors to files")
        present: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise index.error(f"weight_map.{name}", f"must be a file's name, got {file!r}")
            if file not in present:
                present[file] = set(_tensor_names(self._folder / file))
            if name not in present[file]:
                raise CheckpointError(f"{self._folder / file}: tensor {name} is missing")
        return {name: self._folder / file for name, file in weight_map.items()}


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors: {error}") from None
