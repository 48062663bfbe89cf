"""The reader of config.json's quantization of weights; anything but FP8 is refused by name."""

from __future__ import annotations

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.config.fp8_weights import BLOCK, Fp8Weights, ScaleShape

_FORMATS = ("float-quantized", "naive-quantized")
"""The formats of compressed-tensors that store float8 as it is."""


def read_quantization(config: ConfigFile) -> Fp8Weights | None:
    """The quantization of weights; None if they are not quantized."""
    if not config.has("quantization_config"):
        return None
    quantization = config.section("quantization_config")
    method = quantization.text("quant_method")
    match method:
        case "fp8":
            return _read_fp8(quantization)
        case "compressed-tensors":
            return _read_compressed(quantization)
    raise quantization.error(
        "quant_method", f"of {method!r} is not supported: only fp8 and compressed-tensors are"
    )


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


def _read_compressed(quantization: ConfigFile) -> Fp8Weights:
    form = quantization.text("format")
    if form not in _FORMATS:
        raise quantization.error(
            "format", f"of {form!r} is not supported: only {' and '.join(_FORMATS)} are"
        )
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
    first, *others = (_read_group(groups.section(name)) for name in names)
    if any(other != first for other in others):
        raise quantization.error("config_groups", "that differ are not supported")
    return first


def _read_group(group: ConfigFile) -> Fp8Weights:
    weights = group.section("weights")
    _check_float8(weights)
    _check_flag(weights, "dynamic", False)
    strategy = weights.text("strategy")
    if strategy not in list(ScaleShape):
        raise weights.error("strategy", f"of {strategy!r} is not supported")
    if strategy == ScaleShape.BLOCK:
        _check_block(weights, "block_structure", weights.get("block_structure"))
    if not group.has("input_activations"):
        raise group.error("input_activations", "is null: only products of FP8 are supported")
    inputs = group.section("input_activations")
    _check_float8(inputs)
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
    _check_float8(scheme)
    _check_flag(scheme, "dynamic", False)
    if scheme.text("strategy", "tensor") != "tensor":
        raise scheme.error("strategy", "must be 'tensor'")


def _check_float8(numbers: ConfigFile) -> None:
    if (kind := numbers.text("type")) != "float":
        raise numbers.error("type", f"of {kind!r} is not supported: only 'float' is")
    if (bits := numbers.size("num_bits")) != 8:
        raise numbers.error("num_bits", f"of {bits} is not supported: only 8 is")
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
