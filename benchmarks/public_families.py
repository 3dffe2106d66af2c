"""Small random models of a public library's families, and batches for them; nothing is downloaded.

    small("bert")  ->  Family: the task, the model's class, its shrunken configuration, a function that makes batches

`RULES` shrink a family's default configuration by the names of its numbers. `OVERRIDES` lists families whose numbers
must match each other. Dropout is the library's, except in `SWITCHED_OFF`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

TASKS = {
    "translation": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "masked language": "MASKED_LM",
    "language": "CAUSAL_LM",
    "images": "IMAGE_CLASSIFICATION",
    "images and text": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "video": "VIDEO_CLASSIFICATION",
    "segmentation": "SEMANTIC_SEGMENTATION",
    "speech": "CTC",
    "audio": "AUDIO_CLASSIFICATION",
    "time series": "TIME_SERIES_PREDICTION",
    "questions": "QUESTION_ANSWERING",
}
"""Tasks and the library's table of their models. A family belongs to its first task."""

VOCABULARY, ROWS, LENGTH, IMAGE, CLASSES = 96, 2, 16, 32, 2
SOUND = 4800
"""Samples of sound; a spectrogram has a frame per 80 samples."""

COMMON = (
    *("albert", "bart", "bert", "bloom", "cohere", "convnext", "dinov2", "electra", "falcon", "gemma4_unified"),
    *("gpt2", "gpt_neo", "llama", "mamba", "mamba2", "marian", "mistral", "mixtral", "moonshine", "olmoe", "opt"),
    *("pegasus", "qwen2_moe", "resnet", "stablelm", "swin", "t5", "vit", "whisper", "xglm"),
)
"""Thirty popular families of all kinds."""

LARGEST = 20_000_000
"""Maximum parameters of a model."""


@dataclass(frozen=True)
class Family:
    name: str
    task: str
    model_class: Any
    config: Any

    def build(self) -> nn.Module:
        model: nn.Module = self.model_class(self.config)
        return model.train()

    def batch(self, model: Any, seed: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(seed)
        return _batch(self, model, draw)


def names() -> list[str]:
    return list(dict.fromkeys(name for task in TASKS for name in _classes(task)))


def small(name: str) -> Family:
    """Return a family with its first task and a shrunken configuration."""
    from transformers import CONFIG_MAPPING

    task = next(task for task in TASKS if name in _classes(task))
    config = shrunken(CONFIG_MAPPING[name], OVERRIDES.get(name, {}))
    return Family(name, task, _class_of(task, name), config)


def loss_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return model(**batch).loss


def _classes(task: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")


def _class_of(task: str, name: str) -> Any:
    import transformers

    named = _classes(task)[name]
    return getattr(transformers, named if isinstance(named, str) else named[0])


# Configurations

RULES: tuple[tuple[str, Any], ...] = (
    (r"(tgt_|src_|decoder_|char_|t2u_)?vocab_size|vocab_size_per_layer_input|unpadded_vocab_size", VOCABULARY),
    (r"num_(hidden|encoder|decoder)?_?layers|n_layers?|(encoder|decoder|speech_encoder)_layers", 2),
    (r"pred_num_hidden_layers|num_(spatial|temporal)_layers|num_blocks|depth", 2),
    (r"(.*_)?(num_attention_heads|attention_heads|n_heads?|num_heads|num_encoder_attention_heads)", 4),
    (r"swa_num_attention_heads|num_decoder_attention_heads|index_n_heads", 4),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups", 2),
    (r"hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|embedding_size|emb_dim|embedding_dim", 32),
    (r"(decoder|pooler|pred|output|backbone|attention|neck)_hidden_size|word_embed_proj_dim|lru_width", 32),
    (r"projection_dim|classifier_proj_size|pooler_output_size|codevector_dim|proj_codevector_dim", 32),
    (r"hidden_size_per_layer_input|laurel_rank|embedding_rank|adapter_rank|router_hidden_size", 8),
    (r"intermediate_size|(.*_)?ffn_dim|d_ff|dff|dim_ff|n_inner|ffn_hidden_size|dim_feedforward|feed_forward_size", 48),
    (r"(.*_)?intermediate_size(_mlp)?|expert_ffn_hidden_size", 32),
    (r"head_dim|swa_head_dim|d_kv|kv_channels|dim_head|attention_head_dim|v_head_dim|qk_nope_head_dim|d_head", 8),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"linear_(key|value)_head_dim|linear_head_dim", 8),
    (r"linear_num_(key|value)_heads|linear_num_heads", 4),
    (r"index_head_dim", 16),
    (r"index_topk", 4),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"rotary_dim", 8),
    (r"query_pre_attn_scalar", 8),
    (r"(.*_)?(n_positions|max_position_embeddings|n_ctx|max_(source|target|text|speech)_positions|max_seq_len)", 64),
    (r"context_length", 64),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts", 2),
    (r"n_group|topk_group", 1),
    (r"sliding_window|sliding_window_size|attention_window_size|attention_chunk_size|local_attention", 8),
    (r"image_size|crop_size", IMAGE),
    (r"patch_size", 8),
    (r"num_mel_bins|input_feat_per_channel|feature_size", 16),
    (r"(.*_)?state_size|mamba_d_state|d_state", 8),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r"mamba_(num|n)_heads|mamba_nheads", 8),
    (r"mamba_head_dim|mamba_d_head|mamba_headdim", 8),
    (r"(mamba_)?chunk_size", 8),
    (r"mamba_d_ssm", 64),
    (r"num_conv_pos_embeddings|conv_pos_kernel_size", 16),
    (r"num_conv_pos_embedding_groups|n_groups|mamba_n_groups", 2),
    (r"num_groups", 8),
    (r"conv_dim", lambda old: [16] * len(old)),
    (r"tdnn_dim", lambda old: [16] * len(old)),
    (r"depths|num_block_repeats", lambda old: [1] * len(old)),
    (r"hidden_sizes|embed_dims|neck_hidden_sizes", lambda old: [16 * min(i + 1, 2) for i in range(len(old))]),
    (r"num_frames|frames_per_clip", 4),
    (r"num_(image_|query_)?tokens|num_latents", 8),
    (r"d_latents", 32),
    (r"num_ctc_classes", CLASSES),
    (r".*(pad|bos|eos|sep|cls|mask|start|end|image|video|audio|boi|eoi|boa|eoa)_token_(id|index)", 5),
    (r"relative_attention_num_buckets", 8),
)
"""New values of a configuration's numbers, by pattern of the name; the first match applies. Smaller numbers stay."""


SWITCHED_OFF: tuple[tuple[str, Any], ...] = (
    (r"(.*_)?layerdrop", 0.0),  # random skipping of layers
    (r"mask_(time|feature)_prob", 0.0),  # NumPy draws the mask
)
"""Options that a compiled step refuses; the models train without them."""


def shrunken(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    return config_class(**_small_numbers(config_class, overrides))


def _small_numbers(config_class: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    try:
        default = config_class()
    except Exception:  # some defaults are inconsistent
        default = None
    found: dict[str, Any] = {}
    for key, value in (vars(default) if default is not None else {}).items():
        for pattern, off in SWITCHED_OFF:
            if re.fullmatch(pattern, key) and value:
                found[key] = off
        rule = next((new for pattern, new in RULES if re.fullmatch(pattern, key)), None)
        if rule is None or value is None or isinstance(value, bool):
            continue
        if callable(rule) and isinstance(value, list | tuple):
            found[key] = rule(value)
        elif isinstance(value, int) and not callable(rule):
            found[key] = min(value, rule)
    for key, nested in getattr(config_class, "sub_configs", {}).items():
        if isinstance(nested, type) and hasattr(nested, "sub_configs") and nested.__name__ != "AutoConfig":
            found[key] = _small_numbers(nested, overrides.get(key, {}))
    heads, groups = found.get("num_attention_heads"), found.get("num_key_value_heads")
    if heads is not None and groups is not None and default.num_key_value_heads == default.num_attention_heads:
        found["num_key_value_heads"] = heads
    if issubclass(config_class, PreTrainedConfig):
        found["num_labels"] = CLASSES
    return {**found, **{key: value for key, value in overrides.items() if not isinstance(value, Mapping)}}


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
_LINEAR_AND_FULL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_DECODER = {"decoder_start_token_id": 5, "pad_token_id": 5}
_CTC = {"vocab_size": VOCABULARY}
_NO_STRINGS = {"mask_time_length": 2, "mask_feature_length": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "t5": _DECODER,
    "longt5": _DECODER,
    "switch_transformers": _DECODER,
    "pop2piano": _DECODER,
    "fsmt": {"tgt_vocab_size": VOCABULARY, "src_vocab_size": VOCABULARY},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 5, "mask_token_id": 6},
    "esmc": {"vocab_size": VOCABULARY},
    "mpnet": {"vocab_size": VOCABULARY},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 8},
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "attention_head_size": 8,
        "num_buckets": 4,
        "is_decoder": False,
    },
    "xmod": {"default_language": "en_XX"},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "bailing_hybrid": _LINEAR_AND_FULL,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": _LINEAR_AND_FULL,
    "qwen3_5_text": _LINEAR_AND_FULL,
    "qwen3_5_moe_text": _LINEAR_AND_FULL,
    "qwen3_next": _LINEAR_AND_FULL,
    "qwen4_exp_text": _LINEAR_AND_FULL,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "mamba"]},
    "zamba2": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"]},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "xlstm": {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "hidden_size": 64, "num_heads": 4},
    "donut-swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "pvt": {"hidden_sizes": [16, 32, 32, 32], "num_attention_heads": [1, 2, 2, 4]},
    "pvt_v2": {"hidden_sizes": [16, 32, 32, 32], "num_attention_heads": [1, 2, 2, 4]},
    "levit": {"hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 2], "key_dim": [8, 8, 8], "image_size": 224},
    "mobilevitv2": {"image_size": 64},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 32, 32]},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "hidden_size": 32},
    "lilt": {"hidden_size": 48},
    "data2vec-audio": _CTC,
    "hubert": _CTC,
    "sew": _CTC,
    "sew-d": _CTC,
    "unispeech": _CTC,
    "unispeech-sat": _CTC,
    "wav2vec2": _CTC,
    "wav2vec2-bert": _CTC,
    "wav2vec2-conformer": _CTC,
    "wavlm": _CTC,
    "granite_speech5_ctc": {"encoder_config": {"context_size": 16}},
    "speecht5": _NO_STRINGS,
    "moonshine": _DECODER,
}
"""Exceptions from the rules: numbers that must match each other."""


# Batches


def _batch(family: Family, model: Any, draw: torch.Generator) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    inputs = _FIRST_INPUT[str(model.main_input_name)]
    batch |= inputs(family, draw)
    return batch | _labels(family, batch, draw)


def _integers(draw: torch.Generator, high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=draw)


def _text(family: Family, draw: torch.Generator) -> dict[str, Any]:
    length = getattr(family.config, "fxcomp_length", LENGTH)
    text = {
        "input_ids": _integers(draw, VOCABULARY, ROWS, length, low=10),
        "attention_mask": torch.ones(ROWS, length, dtype=torch.long),
    }
    return {**text, **_images(family, draw), "return_loss": True} if family.task == "images and text" else text


def _images(family: Family, draw: torch.Generator) -> dict[str, Any]:
    config = getattr(family.config, "vision_config", family.config)
    size, channels = getattr(config, "image_size", IMAGE), getattr(config, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if isinstance(height, Mapping):
        height, width = height["height"], height["width"]
    frames = (getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4),)
    shape = (ROWS, *(frames if family.task == "video" else ()), channels, height, width)
    videos = (
        family.task == "video" and "pixel_values_videos" in inspect.signature(family.model_class.forward).parameters
    )
    return {"pixel_values_videos" if videos else "pixel_values": torch.randn(shape, generator=draw)}


def _waves(family: Family, draw: torch.Generator) -> dict[str, Any]:
    if hasattr(family.config, "max_length") and hasattr(family.config, "num_mel_bins"):
        shape = (ROWS, family.config.max_length, family.config.num_mel_bins)
        return {"input_values": torch.randn(shape, generator=draw)}
    return {"input_values": torch.randn(ROWS, SOUND, generator=draw)}


def _spectrogram(family: Family, draw: torch.Generator) -> dict[str, Any]:
    config = getattr(family.config, "encoder_config", getattr(family.config, "audio_config", family.config))
    bins = next((getattr(config, key) for key in _BINS if hasattr(config, key)), 16)
    if family.name in ("whisper", "moonshine_streaming"):
        return {"input_features": torch.randn(ROWS, bins, 2 * config.max_source_positions, generator=draw)}
    return {"input_features": torch.randn(ROWS, SOUND // 80, bins, generator=draw)}


_BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")


def _series(family: Family, draw: torch.Generator) -> dict[str, Any]:
    return {"past_values": torch.randn(ROWS, family.config.context_length, generator=draw)}


_FIRST_INPUT: dict[str, Callable[[Family, torch.Generator], dict[str, Any]]] = {
    "input_ids": _text,
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "input_values": _waves,
    "input_features": _spectrogram,
    "past_values": _series,
}


def _labels(family: Family, batch: Mapping[str, Any], draw: torch.Generator) -> dict[str, Any]:
    match family.task:
        case "masked language" | "language":
            return {"labels": batch["input_ids"]}
        case "translation" | "speech to text":
            return {"labels": _integers(draw, VOCABULARY, ROWS, 7, low=10)}
        case "speech":
            return {"labels": _integers(draw, VOCABULARY, ROWS, 4, low=10)}
        case "images" | "video" | "audio":
            return {"labels": _integers(draw, CLASSES, ROWS)}
        case "segmentation":
            height, width = batch["pixel_values"].shape[-2:]
            return {"labels": _integers(draw, CLASSES, ROWS, height, width)}
        case "questions":
            return {"start_positions": _integers(draw, LENGTH, ROWS), "end_positions": _integers(draw, LENGTH, ROWS)}
        case "time series":
            return {"future_values": torch.randn(ROWS, _horizon(family), generator=draw)}
        case _:
            return {}


def _horizon(family: Family) -> int:
    """Return the number of steps that a time-series model predicts."""
    config = family.config
    return int(getattr(config, "prediction_length", None) or getattr(config, "horizon_length", 8))
