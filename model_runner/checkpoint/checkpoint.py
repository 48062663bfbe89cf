"""A model's weights on disk: safetensors, in one file or in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.digest import WeightsDigest
from kvrelay.model_runner.checkpoint.tensor_names import name_tensors
from kvrelay.model_runner.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FP8 = torch.float8_e4m3fn
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""The tensors of frequencies in old Llama checkpoints; the configuration has them already."""


class Checkpoint:
    """Tensors by name, read from disk when taken.

    Names are those of a decoder alone, as `name_tensors` makes them of the stored ones.

    Args:
        folder: holds model.safetensors, or an index and its shards.
        num_layers: the layers of the decoder; tensors of further ones are left out.
        dtype: the dtype that taken tensors are cast to.
        device: the device that they are put on.
        on_read: called with the size of each tensor that was read, in bytes.

    Raises:
        CheckpointError: something is missing, misshapen or corrupt; one line names the file, and
            the tensor if there is one.
    """

    def __init__(
        self,
        folder: Path,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._on_read = on_read
        files = self._locate()
        self._stored = name_tensors(files, num_layers)
        self._files = {name: files[stored] for name, stored in self._stored.items()}
        self._taken: set[str] = set()
        self._digest = WeightsDigest()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that taken tensors are cast to."""
        return self._dtype

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

        It is cast to `dtype` if one is given, else to the checkpoint's. It is a copy: later changes
        of the file do not change it.
        """
        tensor = self._read(name)
        self._check_shape(name, tensor, shape)
        # safetensors maps the file: without a copy, a write into it would change loaded weights.
        return self._add(name, tensor, tensor.to(self._device, dtype or self._dtype, copy=True))

    def take_stacked(
        self, parts: Mapping[str, int], inner: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensors `parts` (names to rows of shape `inner`), one below the other.

        Each is read into its place: they are never in memory twice. With `dtype` FP8 all must be
        stored in it.
        """
        rows = list(parts.values())
        whole = torch.empty(sum(rows), *inner, dtype=dtype or self._dtype, device=self._device)
        for name, place in zip(parts, torch.split(whole, rows), strict=True):
            tensor = self._read(name, whole.dtype)
            self._check_shape(name, tensor, tuple(place.shape))
            self._add(name, tensor, place.copy_(tensor))
        return whole

    def take_scales(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The scales `name` in float32, as `shape`; stored dimensions of 1 do not matter."""
        tensor = self._read(name, torch.float8_e8m0fnu)
        if _without_ones(tensor.shape) != _without_ones(shape):
            self._check_shape(name, tensor, shape)
        scales = tensor.to(self._device, torch.float32, copy=True).view(shape)
        return self._add(name, tensor, scales)

    def take_number(self, name: str) -> float:
        """The tensor `name` of one floating point number."""
        tensor = self._read(name)
        if tensor.numel() != 1:
            self._check_shape(name, tensor, ())
        return self._add(name, tensor, tensor.to(torch.float32, copy=True)).item()

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor as stored; 8-bit ones only in `dtype`, and for FP8 only FP8 ones."""
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self._stored[name])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} is not readable: {error}") from None
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, not floating point")
        if tensor.dtype.itemsize == 1 and tensor.dtype is not dtype:
            raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype} without a known scale")
        if dtype is FP8 and tensor.dtype is not FP8:
            raise CheckpointError(f"{path}: tensor {name} has a scale, but is {tensor.dtype}")
        return tensor

    def _check_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name} has shape {list(tensor.shape)}, "
                f"expected {list(shape)}"
            )

    def _add(self, name: str, tensor: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
        """`loaded`, recorded as the tensor made of the stored `tensor`."""
        self._taken.add(name)
        self._digest.add(name, loaded)
        self._on_read(tensor.nbytes)
        return loaded

    def skip(self, name: str) -> None:
        """Declare that `name`, if it exists, is rightly not used."""
        self._taken.add(name)

    def finish(self) -> None:
        """Refuse tensors that were not taken: without a bias, say, the model is another one."""
        left = [
            name
            for name in sorted(self._files.keys() - self._taken)
            if not name.endswith(_IGNORED_SUFFIX)
        ]
        if left:
            raise CheckpointError(
                f"{self._files[left[0]]}: tensor {self._stored[left[0]]} has no place in this "
                "architecture" + (f" (nor have {len(left) - 1} more)" if len(left) > 1 else "")
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


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _tensor_names(path: Path) -> list[str]:
    try:
        path.open("rb").close()  # `safe_open` calls whatever it cannot open "not found"
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors: {error}") from None
