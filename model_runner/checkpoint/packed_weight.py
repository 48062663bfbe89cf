"""Weights in few bits: each format as its checkpoints have it, in one form in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch.nn import functional

from kvrelay.model_runner.config.quantization import PackedFormat

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs among the eight nibbles of a word."""
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of e2m1 without their sign, which is the highest bit."""
_MX_GROUP: Final = 32
_SCALES: Final = (torch.float16, torch.bfloat16, torch.float32)
_ROWS: Final = 128
"""The outputs that are dequantized at a time: all in float32 would take several times a weight."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[out, in]``, which is ``(codes - zeros) * scales``."""

    codes: torch.Tensor
    """``[out, in]`` uint8, or int8 without `zeros`."""
    scales: torch.Tensor
    """``[out, groups]`` float32."""
    zeros: torch.Tensor | None = None
    """``[out, groups]`` uint8; None: zero is 0."""
    groups: torch.Tensor | None = None
    """``[in]`` int64: the group of each input; None: equally many neighbours are a group."""
    values: torch.Tensor | None = None
    """The float32 number that each code stands for; None: codes are integers."""
    bits: int = 8
    """The bits of a code."""

    @classmethod
    def stack(cls, parts: Sequence[PackedWeight]) -> PackedWeight | None:
        """The weights one below the other; None: they differ in form, or in groups."""
        first, *others = parts
        if any(one.values is not None or one.zeros is None for one in parts):
            return None
        for other in others:
            if first.groups is None or other.groups is None:
                if first.groups is not other.groups:
                    return None
            elif not torch.equal(first.groups, other.groups):
                return None
            same = first.scales.shape[1] == other.scales.shape[1] and first.bits == other.bits
            if not same or first.codes.dtype is not other.codes.dtype:
                return None
        zeros = [one.zeros for one in parts if one.zeros is not None]
        return replace(
            first,
            codes=torch.cat([one.codes for one in parts]),
            scales=torch.cat([one.scales for one in parts]),
            zeros=torch.cat(zeros),
        )

    def reorder(self, order: torch.Tensor) -> PackedWeight:
        """Reorder outputs: output ``i`` of the result is ``order[i]``."""
        return replace(
            self,
            codes=self.codes[order],
            scales=self.scales[order],
            zeros=None if self.zeros is None else self.zeros[order],
        )

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`, each number rounded once."""
        weight = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        self.dequantize_into(weight)
        return weight

    def dequantize_into(self, weight: torch.Tensor) -> None:
        """Write the numbers into a `weight` ``[out, in]``, each rounded once."""
        groups = self._groups()
        for start in range(0, len(weight), _ROWS):
            rows = slice(start, start + _ROWS)
            codes = self.codes[rows]
            numbers = codes.float() if self.values is None else self.values[codes.int()]
            if self.zeros is not None:
                numbers -= self.zeros[rows].float()[:, groups]
            weight[rows] = numbers * self.scales[rows][:, groups]

    def _groups(self) -> torch.Tensor:
        """``[in]``: the group of each input."""
        if self.groups is not None:
            return self.groups
        inputs, groups = self.codes.shape[1], self.scales.shape[1]
        return torch.arange(inputs, device=self.codes.device) // -(-inputs // groups)


class Parts(Protocol):
    """The stored tensors of one product."""

    def has(self, part: str) -> bool:
        """Whether there is a tensor `part`."""
        ...

    def take(self, part: str, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """The tensor `part`, of one of `dtypes`; a dimension of None may have any size.

        Stored dimensions of 1 do not matter where `shape` is of one number.
        """
        ...

    def skip(self, part: str) -> None:
        """Declare that a tensor `part`, if there is one, is rightly not used."""
        ...

    def check(self, part: str, is_right: bool, problem: str) -> None:
        """Refuse the checkpoint for a `problem` of the tensor `part` unless it `is_right`."""
        ...


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a format is recognized and read."""

    mark: str
    """The tensor that a product has only in this format, by what follows the product's name."""
    data: str
    """The tensor that holds the numbers."""
    numbers: Callable[[int], float]
    """From bits, the numbers in one element of `data`."""
    read: Callable[[Parts, tuple[int, int], int], PackedWeight]
    """A reader of ``[out, in]`` numbers of so many bits."""


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """``[..., n]`` int32 to ``[..., count]`` uint8 of `bits` (1 to 8), the lowest bits first.

    A number may begin in one word and end in the next.
    """
    # A dimension of one word is contiguous in any stride, but not every stride can be viewed.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    missing = -octets.shape[-1] % bits
    octets = functional.pad(octets, (0, missing))
    octets = octets.view(*octets.shape[:-1], -1, bits)
    numbers = []
    for place in range(8):  # eight numbers fill `bits` bytes
        byte, shift = divmod(place * bits, 8)
        number = octets[..., byte] >> shift
        if shift + bits > 8:
            number = number | octets[..., byte + 1] << (8 - shift)
        numbers.append(number & ((1 << bits) - 1))
    return torch.stack(numbers, -1).flatten(-2)[..., :count]


def _read_gptq(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    return _read_gptq_ints(parts, shape, bits, _unpack_less_one)


def _read_gptq_v2(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    return _read_gptq_ints(parts, shape, bits, unpack_bits)


def _read_gptq_symmetric(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    def in_the_middle(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
        zeros = (len(words), count)
        return torch.full(zeros, 1 << (bits - 1), dtype=torch.uint8, device=words.device)

    return _read_gptq_ints(parts, shape, bits, in_the_middle)


def _unpack_less_one(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack zeros that are stored less one."""
    if 32 % bits:
        return (unpack_bits(words, bits, count) + 1) & ((1 << bits) - 1)
    # One subtraction a word made them, so that a zero of 0 has borrowed from the next one.
    return unpack_bits(words + sum(1 << place for place in range(0, 32, bits)), bits, count)


def _read_gptq_ints(
    parts: Parts,
    shape: tuple[int, int],
    bits: int,
    unpack_zeros: Callable[[torch.Tensor, int, int], torch.Tensor],
) -> PackedWeight:
    outputs, inputs = shape
    scales = parts.take("scales", (None, outputs), *_SCALES)
    groups = len(scales)
    packed = parts.take("qweight", (_words(inputs, bits), outputs), torch.int32)
    zeros = parts.take("qzeros", (groups, _words(outputs, bits)), torch.int32)
    return PackedWeight(
        unpack_bits(packed.t(), bits, inputs),
        scales.t().float().contiguous(),
        unpack_zeros(zeros, bits, outputs).t().contiguous(),
        _read_groups(parts, "g_idx", inputs, groups),
        bits=bits,
    )


def _read_awq(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    outputs, inputs = shape
    scales = parts.take("scales", (None, outputs), *_SCALES)
    words = _words(outputs, bits)
    packed = parts.take("qweight", (inputs, words), torch.int32)
    zeros = parts.take("qzeros", (len(scales), words), torch.int32)

    def in_order(words: torch.Tensor) -> torch.Tensor:
        numbers = unpack_bits(words, bits, outputs).view(len(words), -1, len(_AWQ_ORDER))
        return numbers[..., _AWQ_ORDER].flatten(1).t().contiguous()

    scales = scales.t().float().contiguous()
    return PackedWeight(in_order(packed), scales, in_order(zeros), bits=bits)


def _read_packed_ints(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    outputs, inputs = shape
    stored = parts.take("weight_shape", (2,), torch.int64, torch.int32)
    parts.check("weight_shape", stored.tolist() == list(shape), f"is not {list(shape)}")
    packed = parts.take("weight_packed", (outputs, _words(inputs, bits)), torch.int32)
    scales = _read_scales(parts, outputs, *_SCALES)
    zeros = torch.full((1, 1), 1 << (bits - 1), dtype=torch.uint8, device=packed.device)
    if parts.has("weight_zero_point"):
        words = (_words(outputs, bits), scales.shape[1])
        stored = parts.take("weight_zero_point", words, torch.int32)
        zeros = unpack_bits(stored.t(), bits, outputs).t().contiguous()
    groups = _read_groups(parts, "weight_g_idx", inputs, scales.shape[1])
    parts.skip("input_scale")
    codes = unpack_bits(packed, bits, inputs)
    return PackedWeight(codes, scales, zeros.expand(scales.shape), groups, bits=bits)


def _read_ints(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    codes = parts.take("weight", shape, torch.int8)
    scales = _read_scales(parts, shape[0], *_SCALES)
    for unused in ("input_scale", "input_zero_point"):
        parts.skip(unused)
    if not parts.has("weight_zero_point"):
        return PackedWeight(codes, scales)
    zeros = parts.take("weight_zero_point", tuple(scales.shape), torch.int8)
    return PackedWeight(_unsigned(codes), scales, _unsigned(zeros))


def _unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """Signed numbers of 8 bits, plus 128."""
    return numbers.view(torch.uint8) ^ 128


def _read_nvfp4(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    codes = _read_codes(parts, "weight_packed", shape)
    scales = _read_scales(parts, shape[0], torch.float8_e4m3fn)
    scale = parts.take("weight_global_scale", (1,), torch.float32)
    parts.skip("input_global_scale")
    return PackedWeight(codes, scales / scale, values=_fp4_values(codes))


def _read_modelopt(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    codes = _read_codes(parts, "weight", shape)
    scales = _read_scales(parts, shape[0], torch.float8_e4m3fn)
    scale = parts.take("weight_scale_2", (1,), torch.float32)
    parts.skip("input_scale")
    return PackedWeight(codes, scales * scale, values=_fp4_values(codes))


def _read_mxfp4(parts: Parts, shape: tuple[int, int], bits: int) -> PackedWeight:
    codes = _read_codes(parts, "weight_packed", shape)
    exponents = parts.take("weight_scale", (shape[0], shape[1] // _MX_GROUP), torch.uint8)
    return PackedWeight(codes, _powers(exponents), values=_fp4_values(codes))


def read_mxfp4_blocks(parts: Parts, shape: tuple[int, int, int]) -> Iterator[PackedWeight]:
    """Yield each expert's weight ``[out, in]``, of ``shape [experts, out, in]``."""
    experts, outputs, inputs = shape
    groups = inputs // _MX_GROUP
    blocks = parts.take("_blocks", (experts, outputs, groups, _MX_GROUP // 2), torch.uint8)
    exponents = parts.take("_scales", (experts, outputs, groups), torch.uint8)
    for block, exponent in zip(blocks, exponents, strict=True):
        codes = _halves(block.flatten(1))
        yield PackedWeight(codes, _powers(exponent), values=_fp4_values(codes))


def _words(count: int, bits: int) -> int:
    """The words of 32 bits that hold `count` numbers."""
    return -(-count * bits // 32)


def _read_scales(parts: Parts, outputs: int, *dtypes: torch.dtype) -> torch.Tensor:
    """``[out, groups]`` float32: of groups, of outputs, or one for all."""
    scales = parts.take("weight_scale", (None, None), *dtypes).float()
    scales = scales.expand(outputs, 1) if scales.numel() == 1 else scales
    parts.check("weight_scale", len(scales) == outputs, f"is not of {outputs} outputs")
    return scales


def _read_groups(parts: Parts, part: str, inputs: int, groups: int) -> torch.Tensor | None:
    if not parts.has(part):
        return None
    index = parts.take(part, (inputs,), torch.int32, torch.int64).long()
    if part == "weight_g_idx" and (index == -1).any():  # a product that was not calibrated
        return None
    in_range = bool((index.min() >= 0) & (index.max() < groups))
    parts.check(part, in_range, f"names others than {groups} groups")
    even = torch.arange(inputs, device=index.device) // -(-inputs // groups)
    return None if torch.equal(index, even) else index


def _read_codes(parts: Parts, part: str, shape: tuple[int, int]) -> torch.Tensor:
    return _halves(parts.take(part, (shape[0], shape[1] // 2), torch.uint8))


def _halves(octets: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` to ``[..., 2 n]``: four bits each, the low ones first."""
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    return exponents.view(torch.float8_e8m0fnu).float()


def _fp4_values(codes: torch.Tensor) -> torch.Tensor:
    positive = torch.tensor(_FP4, device=codes.device)
    return torch.cat((positive, -positive))


STORED: Final = {
    PackedFormat.GPTQ: StoredAs("qweight", "qweight", lambda bits: 32 / bits, _read_gptq),
    PackedFormat.GPTQ_V2: StoredAs("qweight", "qweight", lambda bits: 32 / bits, _read_gptq_v2),
    PackedFormat.GPTQ_SYMMETRIC: StoredAs(
        "qweight", "qweight", lambda bits: 32 / bits, _read_gptq_symmetric
    ),
    PackedFormat.AWQ: StoredAs("qweight", "qweight", lambda bits: 32 / bits, _read_awq),
    PackedFormat.PACKED_INTS: StoredAs(
        "weight_packed", "weight_packed", lambda bits: 32 / bits, _read_packed_ints
    ),
    PackedFormat.INTS: StoredAs("weight_scale", "weight", lambda _: 1, _read_ints),
    PackedFormat.NVFP4: StoredAs("weight_packed", "weight_packed", lambda _: 2, _read_nvfp4),
    PackedFormat.MXFP4: StoredAs("weight_packed", "weight_packed", lambda _: 2, _read_mxfp4),
    PackedFormat.NVFP4_MODELOPT: StoredAs("weight_scale_2", "weight", lambda _: 2, _read_modelopt),
}
