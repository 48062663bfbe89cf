"""A model's weights on disk: safetensors, in one file or in shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.digest import WeightsDigest
from kvrelay.model_runner.checkpoint.packed_weight import (
    STORED,
    PackedWeight,
    read_mxfp4_blocks,
)
from kvrelay.model_runner.checkpoint.tensor_names import name_tensors
from kvrelay.model_runner.config.quantization import (
    PackedFormat,
    PackedWeights,
    Quantization,
    Scheme,
)
from kvrelay.model_runner.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FP8 = torch.float8_e4m3fn
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""The tensors of frequencies in old Llama checkpoints; the configuration has them already."""
_WEIGHT = ".weight"
_BLOCKS = "_blocks"
_ANY_BIAS = (PackedFormat.GPTQ, PackedFormat.GPTQ_V2, PackedFormat.GPTQ_SYMMETRIC)
"""The formats whose tools write biases of zeros for products that have none."""


class Checkpoint:
    """Tensors by name, read from disk when taken.

    Names are those of a decoder alone, as `name_tensors` makes them of the stored ones.
    A weight in few bits is taken by its plain name, and is dequantized while it is read.

    Args:
        folder: holds model.safetensors, or an index and its shards.
        num_layers: the layers of the decoder; tensors of further ones are left out.
        dtype: the dtype that taken tensors are cast to.
        device: the device that they are put on.
        on_read: called with the size of each tensor that was read, in bytes.
        quantization: how weights are stored that are quantized.

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
        quantization: Quantization | None = None,
    ) -> None:
        self._folder = folder
        self._quantization = quantization or Quantization(None)
        self._dtype = dtype
        self._device = device
        self._on_read = on_read
        files = self._locate()
        self._stored = name_tensors(files, num_layers)
        self._files = {name: files[stored] for name, stored in self._stored.items()}
        self._products = {_product(name): _product(one) for name, one in self._stored.items()}
        """The stored names of products, by which their quantization is described."""
        self._schemes: dict[str, Scheme | None] = {}
        self._taken: set[str] = set()
        self._digest = WeightsDigest()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that taken tensors are cast to."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device that taken tensors are put on."""
        return self._device

    @property
    def digest(self) -> str:
        """The hash of all tensors that were taken, as they were handed out."""
        return self._digest.hexdigest()

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor `name`."""
        return name in self._files or self._packing(name) is not None

    def has_other(self, name: str, taken: torch.Tensor) -> bool:
        """Whether there is a tensor `name` with other numbers than `taken` has."""
        if name not in self:
            return False
        if self._packing(name) or self._load(name).dtype.itemsize == 1:
            return True
        return not torch.equal(self._load(name).to(taken.device, taken.dtype), taken)

    def scheme_of(self, product: str) -> Scheme | None:
        """How the weight of a product is stored if it is quantized."""
        if product not in self._schemes:
            stored = self._products.get(product, product)
            self._schemes[product] = self._quantization.scheme_of(stored)
        return self._schemes[product]

    def packed_sizes(self) -> tuple[int, int]:
        """The bytes of all weights in few bits as they are stored, and how many numbers they are.

        Headers tell it: no tensor is read.
        """
        names_of = defaultdict(list)
        for name, path in self._files.items():
            names_of[path].append(name)
        stored, numbers = 0, 0.0
        for path, names in names_of.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    if per_element := self._numbers_per_element(name):
                        data = file.get_tensor(self._stored[name])  # mapped, not read
                        stored += data.nbytes
                        numbers += data.numel() * per_element
        return stored, int(numbers)

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor `name`, which must be floating point and of exactly `shape`.

        It is cast to `dtype` if one is given, else to the checkpoint's. It is a copy: later changes
        of the file do not change it.
        """
        if packing := self._packing(name):
            weight = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
            return self._unpack_into(weight, name, packing)
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
            if packing := self._packing(name):
                self._unpack_into(place, name, packing)
                continue
            tensor = self._read(name, whole.dtype)
            self._check_shape(name, tensor, tuple(place.shape))
            self._add(name, tensor, place.copy_(tensor))
        return whole

    def is_packed(self, name: str) -> bool:
        """Whether the weight `name` is a matrix in few bits."""
        packing = self._packing(name)
        return packing is not None and packing.format is not PackedFormat.MXFP4_BLOCKS

    def take_packed(self, name: str, shape: tuple[int, int]) -> PackedWeight:
        """The weight `name`, which `is_packed`, in few bits."""
        packing = self._packing(name)
        assert packing is not None
        product = name.removesuffix(_WEIGHT)
        self._digest.note(product, packing)
        return STORED[packing.format].read(_Parts(self, f"{product}."), shape, packing.bits)

    def take_stored(
        self, name: str, shape: tuple[int | None, ...], dtypes: Sequence[torch.dtype]
    ) -> torch.Tensor:
        """A tensor of a packed weight as it is stored, of one of `dtypes`.

        A dimension of None may have any size. One number may be stored in any shape.
        """
        tensor = self._load(name)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise self.error(name, f"is {tensor.dtype}, not {wanted}")
        if shape == (1,) and tensor.numel() == 1:
            tensor = tensor.view(shape)
        if tensor.dim() == 1 and len(shape) == 2:
            tensor = tensor[:, None]
        expected = tuple(
            size if wanted is None else wanted
            for size, wanted in zip(tensor.shape, shape, strict=False)
        )
        if len(tensor.shape) != len(shape):
            expected = tuple(wanted or 0 for wanted in shape)
        self._check_shape(name, tensor, expected)
        return self._add(name, tensor, tensor.to(self._device))

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
        tensor = self._load(name)
        if not tensor.is_floating_point():
            raise self.error(name, f"is {tensor.dtype}, not floating point")
        if tensor.dtype.itemsize == 1 and tensor.dtype is not dtype:
            raise self.error(name, f"is {tensor.dtype} without a known scale")
        if dtype is FP8 and tensor.dtype is not FP8:
            raise self.error(name, f"has a scale, but is {tensor.dtype}")
        return tensor

    def _load(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self._stored[name])
        except (SafetensorError, OSError) as error:
            raise self.error(name, f"is not readable: {error}") from None
        return tensor

    def error(self, name: str, problem: str) -> CheckpointError:
        """The one-line error about the tensor `name`, for the caller to raise."""
        return CheckpointError(f"{self._files[name]}: tensor {self._stored[name]} {problem}")

    def _packing(self, name: str) -> PackedWeights | None:
        """How the tensor `name` is packed; None: it is stored as it is, or not at all."""
        product = name.removesuffix(_WEIGHT)
        scheme = self.scheme_of(product)
        if not isinstance(scheme, PackedWeights):
            return None
        if scheme.format is PackedFormat.MXFP4_BLOCKS:
            return scheme if f"{name}{_BLOCKS}" in self._files else None
        mark = f"{product}.{STORED[scheme.format].mark}"
        return scheme if name.endswith(_WEIGHT) and mark in self._files else None

    def _unpack_into(self, weight: torch.Tensor, name: str, packing: PackedWeights) -> torch.Tensor:
        """Fill and return `weight`: ``[out, in]``, or of MXFP4's blocks ``[experts, in, out]``."""
        if packing.format is PackedFormat.MXFP4_BLOCKS:
            experts, inputs, outputs = weight.shape
            self._digest.note(name, packing)
            stored = read_mxfp4_blocks(_Parts(self, name), (experts, outputs, inputs))
            for place, expert in zip(weight, stored, strict=True):
                expert.dequantize_into(place.t())
            return weight
        outputs, inputs = weight.shape
        self.take_packed(name, (outputs, inputs)).dequantize_into(weight)
        return weight

    def _numbers_per_element(self, name: str) -> float:
        """The numbers in an element of the tensor `name`; 0 if it has none of a packed weight."""
        if name.endswith(_BLOCKS):
            return 2 if self._packing(name.removesuffix(_BLOCKS)) else 0
        product, _, part = name.rpartition(".")
        packing = self._packing(f"{product}{_WEIGHT}")
        if packing is None or packing.format is PackedFormat.MXFP4_BLOCKS:
            return 0
        stored = STORED[packing.format]
        return stored.numbers(packing.bits) if part == stored.data else 0

    def _check_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise self.error(name, f"has shape {list(tensor.shape)}, expected {list(shape)}")

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
            if not (name.endswith(_IGNORED_SUFFIX) or self._is_bias_of_zeros(name))
        ]
        if left:
            raise CheckpointError(
                f"{self._files[left[0]]}: tensor {self._stored[left[0]]} has no place in this "
                "architecture" + (f" (nor have {len(left) - 1} more)" if len(left) > 1 else "")
            )

    def _is_bias_of_zeros(self, name: str) -> bool:
        product = name.removesuffix(".bias")
        packing = self._packing(f"{product}{_WEIGHT}")
        if product == name or packing is None or packing.format not in _ANY_BIAS:
            return False
        return not self._load(name).any()

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


def _product(tensor: str) -> str:
    """The name of the product that a tensor belongs to."""
    return tensor.rpartition(".")[0]


class _Parts:
    """The `Parts` of a product: tensors whose names begin with `prefix`."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    def has(self, part: str) -> bool:
        """Whether there is a tensor `part`."""
        return self._prefix + part in self._checkpoint

    def take(self, part: str, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """The tensor `part` of one of `dtypes`; a dimension of None may have any size."""
        return self._checkpoint.take_stored(self._prefix + part, shape, dtypes)

    def skip(self, part: str) -> None:
        """Declare that a tensor `part`, if there is one, is rightly not used."""
        self._checkpoint.skip(self._prefix + part)

    def check(self, part: str, is_right: bool, problem: str) -> None:
        """Refuse the checkpoint for a `problem` of the tensor `part` unless it `is_right`."""
        if not is_right:
            raise self._checkpoint.error(self._prefix + part, problem)


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
