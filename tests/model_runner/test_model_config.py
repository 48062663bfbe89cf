"""What a config.json may say, and the one line that says what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    Qwen2Config,
)

from kvrelay.model_runner.checkpoint.architectures import ARCHITECTURES
from kvrelay.model_runner.checkpoint.config_reader import read_config
from kvrelay.model_runner.checkpoint.text_section import WRAPPERS
from kvrelay.model_runner.config.model_config import (
    GQAConfig,
    LayerConfig,
    MLAConfig,
    ModelConfig,
)
from kvrelay.model_runner.config.moe_backend import ClampedSilu
from kvrelay.model_runner.config.rope import DefaultRope, LinearRope, Llama3Rope, YarnRope
from kvrelay.model_runner.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
}
FULL, SLIDING = "full_attention", "sliding_attention"
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], **GEMMA}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], **GEMMA}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}
V2 = {"architectures": ["DeepseekV2ForCausalLM"]}
EXPERTS = {
    **DEEPSEEK,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
GLM4 = {**EXPERTS, "architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GLM4_LITE = {**EXPERTS, "architectures": ["Glm4MoeLiteForCausalLM"]}
GPT_OSS = {**MINIMAX, "architectures": ["GptOssForCausalLM"]}
WRAPPER_TYPES = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "LlavaForConditionalGeneration": "llava",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
}
WRAPPED: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {**LLAMA, "architectures": None, "model_type": "mistral"},
}


def read(folder: Path, **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return read_config(folder)


def test_fields_and_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.layers == (LayerConfig(DefaultRope(10_000.0)),) * 2
    assert config.attention == GQAConfig(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    assert (config.max_model_len, config.vocab_size) == (128, 131)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == (7,)


def test_generation_config_names_the_ends(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert read(tmp_path).eos_token_ids == (3, 9)


def test_generation_config_without_ends_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path, eos_token_id=[1, 2]).eos_token_ids == (1, 2)


def test_rope_as_written_before_transformers_5(tmp_path: Path) -> None:
    scaling = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 32
    config = read(tmp_path, rope_theta=500000.0, rope_scaling=scaling)
    assert config.layers[0].rope == Llama3Rope(500000.0, 8.0, 1.0, 4.0, 32)


def test_yarn_infers_factor_and_attention_factor(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = read(tmp_path, rope_parameters=rope)
    read_rope = config.layers[0].rope
    assert isinstance(read_rope, YarnRope)
    assert read_rope.factor == 4.0
    assert read_rope.attention_factor == pytest.approx(1.1386294)


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.sliding_window for layer in config.layers]


@pytest.mark.parametrize("window", [None, 128, 4096])
def test_window_that_is_never_felt_is_full_attention(tmp_path: Path, window: int | None) -> None:
    config = read(tmp_path, **MISTRAL, sliding_window=window)
    assert (config.pool_windows, config.layer_pools) == ((None,), ((0, 0), (0, 1)))


def test_all_layers_of_a_mistral_share_its_window(tmp_path: Path) -> None:
    config = read(tmp_path, **MISTRAL, sliding_window=127)
    assert (config.pool_windows, config.layer_pools) == ((127,), ((0, 0), (0, 1)))


def test_absent_window_is_transformers_default(tmp_path: Path) -> None:
    for made in (MistralConfig, Qwen2Config, Gemma2Config, Gemma3TextConfig):
        assert made().sliding_window in (4096, None)
    assert windows(read(tmp_path, **MISTRAL, max_position_embeddings=4096)) == [None, None]
    assert windows(read(tmp_path, **MISTRAL, max_position_embeddings=4097)) == [4096, 4096]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": False}, [None] * 4),
        ({"use_sliding_window": True}, [None] * 4),
        ({"use_sliding_window": True, "max_window_layers": 0}, [9] * 4),
        ({"use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 9]),
        ({"use_sliding_window": True, "layer_types": [SLIDING, FULL] * 2}, [9, None] * 2),
    ],
)
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_a_qwen(
    tmp_path: Path, name: str, changes: dict[str, Any], expected: list[int | None]
) -> None:
    qwen = {"architectures": [name], "num_hidden_layers": 4, "sliding_window": 9}
    assert windows(read(tmp_path, **qwen, **changes)) == expected


def test_places_in_two_pools(tmp_path: Path) -> None:
    config = read(tmp_path, **GEMMA2, num_hidden_layers=5)
    assert windows(config) == [64, None, 64, None, 64]
    assert config.pool_windows == (None, 64)
    assert config.layer_pools == ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2))


def test_gemma3_as_on_the_hub(tmp_path: Path) -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 500, "sliding_window_pattern": 3}
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = read(tmp_path, **GEMMA3, num_hidden_layers=4, rope_scaling=scaling, **old)
    near = LayerConfig(DefaultRope(500.0), 64)
    assert config.layers == (near, near, LayerConfig(LinearRope(1e6, 8.0)), near)
    assert config.tie_word_embeddings
    assert (config.post_norms, config.embedding_scale, config.final_logit_softcapping) == (
        True,
        8.0,
        None,
    )


def test_gemma3_as_transformers_5_saves_it(tmp_path: Path) -> None:
    rope = {FULL: {"rope_type": "default", "rope_theta": 7e5}, SLIDING: {"rope_theta": 300.0}}
    types = {"layer_types": [SLIDING, FULL]}
    config = read(tmp_path, **GEMMA3, rope_parameters=rope, **types)
    assert config.layers == (LayerConfig(DefaultRope(300.0), 64), LayerConfig(DefaultRope(7e5)))


@pytest.mark.parametrize(
    ("changes", "score", "logit"),
    [
        ({}, 50.0, 30.0),
        ({"attn_logit_softcapping": None, "final_logit_softcapping": None}, None, None),
        ({"attn_logit_softcapping": 5, "final_logit_softcapping": 3}, 5.0, 3.0),
    ],
)
def test_absent_softcaps_of_a_gemma2_are_transformers_defaults(
    tmp_path: Path, changes: dict[str, Any], score: float | None, logit: float | None
) -> None:
    made = Gemma2Config()
    assert (made.attn_logit_softcapping, made.final_logit_softcapping) == (50.0, 30.0)
    config = read(tmp_path, **GEMMA2, **changes)
    assert (config.attention.query_heads.softcap, config.final_logit_softcapping) == (score, logit)


def test_the_same_rotation_may_be_told_twice(tmp_path: Path) -> None:
    told = {"rope_type": "linear", "factor": 4.0}
    old = {"type": "linear", "factor": 4.0}
    config = read(tmp_path, rope_parameters={**told, "rope_theta": 1e6}, rope_scaling=old)
    assert config.layers[0].rope == read(tmp_path, rope_theta=1e6, rope_scaling=old).layers[0].rope


def test_latent_heads(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = read(tmp_path, **DEEPSEEK, rope_scaling=yarn)
    assert isinstance(config.attention, MLAConfig)
    assert (config.attention.num_cached_heads, config.attention.cached_head_dim) == (1, 32)
    assert config.attention.q_lora_rank == DeepseekV2Config().q_lora_rank == 1536
    assert config.attention.scale == pytest.approx(20**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert config.layers[0].rope.attention_factor == 1.0
    direct = read(tmp_path, **DEEPSEEK, q_lora_rank=None).attention
    assert isinstance(direct, MLAConfig)
    assert direct.q_lora_rank is None


def experts_by_layer(config: ModelConfig) -> list[bool]:
    return [layer.moe is not None for layer in config.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False]),
        ({"mlp_only_layers": [0]}, [False, True, True]),
    ],
)
@pytest.mark.parametrize("count", ["num_experts", "num_local_experts"])
def test_layers_with_experts_of_a_qwen3(
    tmp_path: Path, count: str, changes: dict[str, Any], expected: list[bool]
) -> None:
    """The number of experts has another name if transformers 5 has saved the model."""
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], count: 8}
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3}
    assert experts_by_layer(read(tmp_path, **qwen, **sizes, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (GLM4, 8),
        ({**GLM4, "partial_rotary_factor": 0.25}, 4),
        ({**GLM4, "rope_parameters": {"partial_rotary_factor": 1.0}}, 16),
        (MINIMAX, 32),
        ({**MINIMAX, "rotary_dim": 16}, 16),
    ],
)
def test_a_part_of_a_head_rotates(tmp_path: Path, changes: dict[str, Any], expected: int) -> None:
    assert read(tmp_path, **changes).attention.rotary_dim == expected


def test_gpt_oss_as_on_the_hub(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {"truncate": False, "original_max_position_embeddings": 4096}
    oss = {**GPT_OSS, "max_position_embeddings": 131072, "rope_theta": 150000}
    config = read(tmp_path, **oss, rope_scaling=yarn)
    assert windows(config) == [128, None]
    assert isinstance(config.attention, GQAConfig)
    assert (config.attention.has_sinks, config.attention.qkv_bias) == (True, True)
    none: list[dict[str, Any]] = [{}, {"rope_scaling": None}, {"rope_scaling": {}}]
    for empty in (*none, {"rope_parameters": None}):
        assert config == read(tmp_path, **oss, **empty), "transformers assumes this yarn"
    moe = config.layers[0].moe
    assert moe is not None
    assert moe.clamped == ClampedSilu(1.702, 7.0)


OVERRIDES = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"num_attention_heads": 32},
}
"""Fields with which transformers' class by itself is no model."""


def assert_absent_fields_are_those_of(
    folder: Path,
    made: dict[str, Any],
    wrap: Callable[[dict[str, Any]], dict[str, Any]],
    optional: bool,
) -> None:
    """Each field may be left out, or is missed by name; never does it become another one."""

    def read_made(fields: dict[str, Any]) -> ModelConfig:
        (folder / "config.json").write_text(json.dumps(wrap(fields)))
        return read_config(folder)

    whole = read_made(made)
    needed = {}
    for name, value in made.items():
        try:
            without = read_made({other: made[other] for other in made if other != name})
        except CheckpointError as error:
            if not str(error).endswith(" is missing"):
                raise
            needed[name] = value
        else:
            assert without == whole, name
    assert read_made({"model_type": made["model_type"], **needed}) == whole
    assert not (optional and needed)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_absent_fields_are_transformers_defaults(tmp_path: Path, name: str) -> None:
    made = CONFIG_MAPPING[ARCHITECTURES[name].model_types[0]]().to_dict()
    made |= OVERRIDES.get(name, {})
    assert_absent_fields_are_those_of(
        tmp_path, made, lambda fields: {**fields, "architectures": [name]}, False
    )


@pytest.mark.parametrize("name", WRAPPERS)
def test_absent_fields_of_a_section_are_transformers_defaults(tmp_path: Path, name: str) -> None:
    made = CONFIG_MAPPING[WRAPPERS[name].text_type]().to_dict()
    assert_absent_fields_are_those_of(
        tmp_path, made, lambda fields: {"architectures": [name], "text_config": fields}, True
    )


@pytest.mark.parametrize(
    ("section", "own"), [(None, None), (None, True), (True, None), (True, False), (False, True)]
)
@pytest.mark.parametrize("name", WRAPPERS)
def test_embeddings_of_a_model_for_images_are_tied_as_by_transformers(
    tmp_path: Path, name: str, section: bool | None, own: bool | None
) -> None:
    model_type, text_type = WRAPPER_TYPES[name], WRAPPERS[name].text_type
    text = {**LLAMA, "architectures": None, "model_type": text_type}
    text |= {} if section is None else {"tie_word_embeddings": section}
    outer = {} if own is None else {"tie_word_embeddings": own}
    reference = CONFIG_MAPPING[model_type].from_dict({**outer, "text_config": dict(text)})
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [name], **outer, "text_config": text})
    )
    assert read_config(tmp_path).tie_word_embeddings is reference.tie_word_embeddings


def test_ends_beside_the_section_of_a_model_for_images(tmp_path: Path) -> None:
    assert read(tmp_path, **WRAPPED, eos_token_id=None).eos_token_ids == (7,)
    config = read(tmp_path, **WRAPPED, eos_token_id=[5, 9])
    assert (config.architecture, config.eos_token_ids) == ("MistralForCausalLM", (5, 9))


def test_a_section_by_its_type_whatever_architecture_it_names(tmp_path: Path) -> None:
    name = "Qwen2_5_VLForConditionalGeneration"
    text = {**LLAMA, "architectures": [name], "model_type": "qwen2_5_vl_text"}
    nested = read(tmp_path, architectures=[name], text_config=text)
    flat = read(tmp_path, architectures=[name], model_type="qwen2_5_vl")
    assert nested == flat
    assert flat.architecture == "Qwen2ForCausalLM"


def test_end_in_generation_config_outside_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [7, 131]}')
    with pytest.raises(CheckpointError) as refusal:
        read(tmp_path)
    assert str(refusal.value) == f"{path}: eos_token_id of 131 is outside the vocabulary of 131"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": 131}, "eos_token_id"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": [SLIDING, SLIDING]}, "layer_types"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window"),
        ({**MISTRAL, "sliding_window": 64, "layer_types": [SLIDING, FULL]}, "layer_types"),
        ({**QWEN3, "layer_types": [SLIDING, FULL]}, "layer_types"),
        ({**QWEN3, "layer_types": ["chunked_attention", FULL]}, "layer_types"),
        ({**QWEN3, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({**GEMMA2, "sliding_window": None}, "layer_types"),
        ({**GEMMA2, "hidden_activation": "gelu"}, "hidden_activation"),
        ({**GEMMA2, "query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA2, "final_logit_softcapping": -1}, "final_logit_softcapping"),
        ({**GEMMA2, "rope_parameters": {FULL: {}}}, f"rope_parameters.{FULL}"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta"),
        (
            {**GEMMA3, "rope_parameters": {FULL: {"rope_type": "dynamic"}}},
            f"rope_parameters.{FULL}.rope_type",
        ),
        ({**GEMMA3, "rope_parameters": {FULL: {}}, "rope_scaling": {"factor": 8}}, "rope_scaling"),
        ({**DEEPSEEK, "first_k_dense_replace": None}, "first_k_dense_replace"),
        ({**DEEPSEEK, "first_k_dense_replace": 1}, "n_routed_experts"),
        ({**EXPERTS, "n_group": 3}, "n_group"),
        ({**EXPERTS, "n_group": 8}, "n_group"),
        ({**EXPERTS, "topk_group": 5}, "topk_group"),
        ({**EXPERTS, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({**EXPERTS, "n_shared_experts": None}, "n_shared_experts"),
        ({**EXPERTS, "topk_method": "greedy"}, "topk_method"),
        ({**EXPERTS, "scoring_func": "softmax"}, "scoring_func"),
        ({**EXPERTS, "moe_layer_freq": 2}, "moe_layer_freq"),
        ({**EXPERTS, **V2, "norm_topk_prob": True}, "norm_topk_prob"),
        ({**EXPERTS, **V2, "topk_method": "noaux_tc"}, "topk_method"),
        ({**DEEPSEEK, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank"),
        ({**DEEPSEEK, "q_lora_rank": 0}, "q_lora_rank"),
        ({**DEEPSEEK, "qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({**DEEPSEEK, "rope_interleave": "no"}, "rope_interleave"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": None, "model_type": "gpt2"}, "architectures"),
        ({**WRAPPED, "architectures": ["PaliGemmaForConditionalGeneration"]}, "architectures"),
        (
            {**WRAPPED, "text_config": {**WRAPPED["text_config"], "model_type": "gpt2"}},
            "text_config.model_type",
        ),
        (
            {**WRAPPED, "text_config": {**WRAPPED["text_config"], "vocab_size": 0}},
            "text_config.vocab_size",
        ),
        ({**GLM4, "partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({**MINIMAX, "rotary_dim": 34}, "partial_rotary_factor"),
        ({**MINIMAX, "num_local_experts": None}, "num_local_experts"),
        ({**EXPERTS, "mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ({**EXPERTS, "mlp_layer_types": ["sparse", "moe"]}, "mlp_layer_types"),
        ({**GPT_OSS, "swiglu_limit": 0}, "swiglu_limit"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window"),
        ({**QWEN3_MOE, "first_k_dense_replace": 1}, "first_k_dense_replace"),
        ({**QWEN3_MOE, "mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({**QWEN3_MOE, "routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ({**MINIMAX, "routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ({**MINIMAX, "n_group": 4}, "n_group"),
        ({**MINIMAX, "topk_group": 2}, "topk_group"),
        ({**MINIMAX, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({**GLM4_LITE, "first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({**EXPERTS, "decoder_sparse_step": 3}, "decoder_sparse_step"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"factor": 2.0}},
            "rope_scaling",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "rope_parameters.high_freq_factor",
        ),
    ],
)
def test_refusal_names_file_and_field(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read(tmp_path, **changes)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: {field} ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "file not found"), ("{", "not readable as JSON"), ("[]", "must hold a JSON object")],
)
def test_unreadable_file(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        read_config(tmp_path)
