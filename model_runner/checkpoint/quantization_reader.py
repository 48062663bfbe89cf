"""The reader of config.json's quantization of weights; what is not known is refused by name."""

from __future__ import annotations

import re
from typing import Final

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.config.fp8_weights import BLOCK, Fp8Weights, ScaleShape
from kvrelay.model_runner.config.quantization import (
    PackedFormat,
    PackedWeights,
    Quantization,
    Scheme,
)

_MODELOPT_NAME: Final = "hf_quant_config.json"
"""The file in which ModelOpt alone describes what it has written."""
_METHODS: Final = ("fp8", "gptq", "awq", "compressed-tensors", "modelopt", "mxfp4")
_FP8_FORMATS: Final = ("float-quantized", "naive-quantized")
"""The formats of compressed-tensors that store float8 as it is."""
_INT_FORMATS: Final = (PackedFormat.PACKED_INTS, PackedFormat.INTS, "naive-quantized")
_FP4_FORMATS: Final = (PackedFormat.NVFP4, PackedFormat.MXFP4)
_GPTQ_BITS: Final = (2, 3, 4, 8)
_PATTERN: Final = "re:"
_MORE, _LESS = "+:", "-:"
"""The marks of GPTQModel's patterns: products with other settings, and those left as they were."""


def read_quantization(config: ConfigFile) -> Quantization | None:
    """The quantization of weights; None if they are not quantized."""
    if not config.has("quantization_config"):
        return _read_modelopt_file(config)
    quantization = config.section("quantization_config")
    method = quantization.text("quant_method")
    match method:
        case "fp8":
            return Quantization(_read_fp8(quantization))
        case "gptq":
            return _read_gptq(quantization)
        case "awq":
            return _read_awq(quantization)
        case "compressed-tensors":
            return _read_compressed(quantization)
        case "modelopt" | "modelopt_fp4" | "modelopt_mixed":
            return _read_modelopt(quantization)
        case "mxfp4":
            return Quantization(PackedWeights(PackedFormat.MXFP4_BLOCKS, 4))
    raise quantization.error(
        "quant_method", f"of {method!r} is not supported: only {', '.join(_METHODS)} are"
    )


def _read_gptq(quantization: ConfigFile) -> Quantization:
    form = quantization.text("checkpoint_format", quantization.text("format", PackedFormat.GPTQ))
    if form not in (PackedFormat.GPTQ, PackedFormat.GPTQ_V2):
        raise quantization.error("checkpoint_format", f"of {form!r} is not supported")
    if (words := quantization.text("pack_dtype", "int32")) != "int32":
        raise quantization.error("pack_dtype", f"of {words!r} is not supported: only int32 is")
    if quantization.flag("is_marlin_format", False):
        raise quantization.error("is_marlin_format", "is true: not supported")

    def read(section: ConfigFile) -> PackedWeights:
        bits = section.size("bits", quantization.size("bits"))
        if bits not in _GPTQ_BITS:
            raise section.error("bits", f"of {bits} is not supported: only {_GPTQ_BITS} are")
        if section.flag("sym", quantization.flag("sym", False)):
            return PackedWeights(PackedFormat.GPTQ_SYMMETRIC, bits)
        if bits == 3 and form == PackedFormat.GPTQ and _is_by_gptqmodel(quantization):
            # It subtracts from whole words what is not 1 in each number.
            raise section.error("bits", "of 3 without sym is not supported as gptqmodel stores it")
        return PackedWeights(PackedFormat(form), bits)

    others = quantization.section("dynamic")
    names = list(quantization.get("dynamic") or ())
    rules = tuple(
        (_compile(quantization, "dynamic", name.removeprefix(_MORE)), read(others.section(name)))
        for name in names
        if not name.startswith(_LESS)
    )
    return Quantization(read(quantization), rules=rules)


def _is_by_gptqmodel(quantization: ConfigFile) -> bool:
    return "gptqmodel" in str(quantization.section("meta").get("quantizer")).lower()


def _read_awq(quantization: ConfigFile) -> Quantization:
    if (version := quantization.text("version", "gemm").lower()) != "gemm":
        raise quantization.error("version", f"of {version!r} is not supported: only 'gemm' is")
    if (bits := quantization.size("bits")) != 4:
        raise quantization.error("bits", f"of {bits} is not supported: only 4 is")
    _check_flag(quantization, "zero_point", True)
    return Quantization(PackedWeights(PackedFormat.AWQ, bits))


def _read_modelopt_file(config: ConfigFile) -> Quantization | None:
    path = config.path.parent / _MODELOPT_NAME
    if not path.exists():
        return None
    return _read_modelopt(ConfigFile.read(path).section("quantization"))


def _read_modelopt(quantization: ConfigFile) -> Quantization:
    kv = quantization.get("kv_cache_quant_algo")
    if kv not in (None, "FP8"):
        raise quantization.error("kv_cache_quant_algo", f"of {kv!r} is not supported")
    _check_kv_scheme(quantization)
    if quantization.text("quant_algo") != "MIXED_PRECISION":
        return Quantization(_read_algorithm(quantization))
    layers = quantization.section("quantized_layers")
    names = list(quantization.get("quantized_layers") or ())
    return Quantization(None, {name: _read_algorithm(layers.section(name)) for name in names})


def _read_algorithm(section: ConfigFile) -> Scheme:
    """Read ModelOpt's name of a scheme."""
    match algorithm := section.text("quant_algo"):
        case "FP8":
            return Fp8Weights(ScaleShape.TENSOR, static_inputs=True)
        case "NVFP4":
            return PackedWeights(PackedFormat.NVFP4_MODELOPT, 4)
    raise section.error("quant_algo", f"of {algorithm!r} is not supported: only FP8 and NVFP4 are")


def _read_fp8(quantization: ConfigFile) -> Fp8Weights:
    """Read the form that DeepSeek, Qwen and AutoFP8 write."""
    if (form := quantization.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise quantization.error("fmt", f"of {form!r} is not supported: only e4m3 is")
    scheme = quantization.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise quantization.error("activation_scheme", f"of {scheme!r} is not supported")
    block = quantization.get("weight_block_size")
    if block is None:
        return Fp8Weights(ScaleShape.TENSOR, scheme == "static")
    _check_block(quantization, "weight_block_size", block)
    if scheme == "static":
        raise quantization.error("activation_scheme", "of 'static' is not supported with blocks")
    return Fp8Weights(ScaleShape.BLOCK)


def _read_compressed(quantization: ConfigFile) -> Quantization:
    form = quantization.text("format")
    sparsity = quantization.section("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise quantization.error("sparsity_config.format", f"of {sparsity!r} is not supported")
    if quantization.get("transform_config"):
        raise quantization.error("transform_config", "is set: not supported")
    _check_kv_scheme(quantization)
    groups = quantization.section("config_groups")
    names = list(quantization.get("config_groups") or ())
    if not names:
        raise quantization.error("config_groups", "must have a group")
    exact: dict[str, Scheme] = {}
    patterns: dict[str, tuple[re.Pattern[str], Scheme]] = {}
    default: Scheme | None = None
    for group in map(groups.section, names):
        scheme = _read_group(quantization, group, group.text("format", form))
        for target in _targets(group):
            if target.startswith(_PATTERN):
                pattern = target.removeprefix(_PATTERN)
                patterns[pattern] = _compile(group, "targets", pattern), scheme
            elif target == "Linear":
                default = scheme
            else:
                exact[target] = scheme
    # The library asks patterns in the order of their texts, whatever groups they are of.
    return Quantization(default, exact, tuple(patterns[one] for one in sorted(patterns)))


def _targets(group: ConfigFile) -> list[str]:
    targets = group.get("targets")
    if targets is None:
        return ["Linear"]
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise group.error("targets", f"must be a list of names, got {targets!r}")
    return targets


def _read_group(owner: ConfigFile, group: ConfigFile, form: str) -> Scheme:
    weights = group.section("weights")
    if form == "float-quantized" or (form in _FP8_FORMATS and weights.text("type") == "float"):
        return _read_fp8_group(group)
    _check_flag(weights, "dynamic", False)
    if form in _INT_FORMATS:
        return _read_ints(weights, form)
    if form in _FP4_FORMATS:
        _check_floats(weights, 4)
        return PackedWeights(PackedFormat(form), 4)
    known = ", ".join(dict.fromkeys((*_FP8_FORMATS, *_INT_FORMATS, *_FP4_FORMATS)))
    says_it = group if group.has("format") else owner
    raise says_it.error("format", f"of {form!r} is not supported: only {known} are")


def _read_ints(weights: ConfigFile, form: str) -> PackedWeights:
    if (kind := weights.text("type")) != "int":
        raise weights.error("type", f"of {kind!r} is not supported: only 'int' is")
    if (strategy := weights.text("strategy")) not in ("group", "channel", "tensor"):
        raise weights.error("strategy", f"of {strategy!r} is not supported")
    bits = weights.size("num_bits")
    packed = form == PackedFormat.PACKED_INTS
    if bits > 8 or (bits < 8 and not packed):
        raise weights.error("num_bits", f"of {bits} is not supported in this format")
    return PackedWeights(PackedFormat.PACKED_INTS if packed else PackedFormat.INTS, bits)


def _read_fp8_group(group: ConfigFile) -> Fp8Weights:
    weights = group.section("weights")
    _check_floats(weights, 8)
    _check_flag(weights, "dynamic", False)
    strategy = weights.text("strategy")
    if strategy not in list(ScaleShape):
        raise weights.error("strategy", f"of {strategy!r} is not supported")
    if strategy == ScaleShape.BLOCK:
        _check_block(weights, "block_structure", weights.get("block_structure"))
    if not group.has("input_activations"):
        raise group.error("input_activations", "is null: only products of FP8 are supported")
    inputs = group.section("input_activations")
    _check_floats(inputs, 8)
    static = not _dynamic(inputs)
    if static and strategy == ScaleShape.BLOCK:
        raise inputs.error("dynamic", "is false: not supported with blocks")
    if static and inputs.text("strategy", "tensor") != "tensor":
        raise inputs.error("strategy", "must be 'tensor' where dynamic is false")
    return Fp8Weights(ScaleShape(strategy), static)


def _check_kv_scheme(quantization: ConfigFile) -> None:
    """Refuse scales of keys and values unless they are FP8's, one a layer."""
    if not quantization.has("kv_cache_scheme"):
        return
    scheme = quantization.section("kv_cache_scheme")
    _check_floats(scheme, 8)
    _check_flag(scheme, "dynamic", False)
    if scheme.text("strategy", "tensor") != "tensor":
        raise scheme.error("strategy", "must be 'tensor'")


def _check_floats(numbers: ConfigFile, expected: int) -> None:
    if (kind := numbers.text("type")) != "float":
        raise numbers.error("type", f"of {kind!r} is not supported: only 'float' is")
    if (bits := numbers.size("num_bits")) != expected:
        raise numbers.error("num_bits", f"of {bits} is not supported: only {expected} is")
    _check_flag(numbers, "symmetric", True)


def _check_flag(numbers: ConfigFile, field: str, expected: bool) -> None:
    if numbers.flag(field, expected) != expected:
        raise numbers.error(field, f"must be {str(expected).lower()}")


def _dynamic(inputs: ConfigFile) -> bool:
    # "local": scales of groups are found with each input, as they are here.
    return inputs.get("dynamic") == "local" or inputs.flag("dynamic", False)


def _check_block(section: ConfigFile, field: str, block: object) -> None:
    if block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise section.error(field, f"of {block!r} is not supported: only {[BLOCK, BLOCK]} is")


def _compile(section: ConfigFile, field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise section.error(field, f"has {pattern!r}, no regular expression: {error}") from None
