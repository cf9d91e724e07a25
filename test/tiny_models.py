"""Tiny models of every causal class of Transformers: randomly initialised, two layers, a vocabulary of about a hundred.

`python test/tiny_models.py` trains each for a step without and with the patch and writes the table of docs/transformers.md.
"""

from __future__ import annotations

import csv
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger.integrations.transformers import patch, report

DATA = Path(__file__).resolve().parent.parent / "docs" / "data" / "transformers_classes.csv"
LARGEST = 4_000_000
"""Parameters of a tiny model, at most."""
VOCAB = 101
SIZES = {
    # attribute of a config: what it becomes where a config has it
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "embed_dim": 32,
    "n_embed": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "dff": 48,
    "n_inner": 48,
    "d_inner": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "feed_forward_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "qk_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "ssm_state_size": 8,
    "lru_width": 32,
    "time_step_rank": 4,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 8, "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
}  # fmt: skip
MLA = {"num_key_value_heads": 4, "head_dim": 4}
OVERRIDES: dict[str, dict[str, Any]] = {
    # class of model: what its config needs beside the sizes above; None leaves the default
    "AXK1ForCausalLM": MLA,
    "AXK2ForCausalLM": MLA,
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "CohereCompassForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "n_shared_experts": 1, "num_key_value_heads": 4, "head_dim": 4},
    "DeepseekV32ForCausalLM": MLA,
    "DeepseekV3ForCausalLM": MLA,
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "GotOcr2ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": VISION | {"output_channels": 32, "mlp_dim": 48},
    },
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3ForConditionalGeneration": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 1},
    "Gemma3nForCausalLM": {
        "intermediate_size": [48, 48],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4UnifiedForCausalLM": GEMMA4,
    "Glm4MoeLiteForCausalLM": MLA,
    "GlmMoeDsaForCausalLM": MLA,
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": {"expert_ffn_hidden_size": 16, "head_dim": 4, "num_key_value_heads": 4},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "MinistralForCausalLM": {"head_dim": 8},
    "NemotronForCausalLM": {"head_dim": 8, "num_key_value_heads": 2},
    "NemotronHForCausalLM": {"n_groups": 1},
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3_5ForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3_5MoeForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen4ExpForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]},
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_shape": [4, 2],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "RoCBertForCausalLM": {"shape_vocab_size": 50, "shape_embed_dim": 8, "pronunciation_vocab_size": 50},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "YoutuForCausalLM": MLA,
    "ZambaForCausalLM": {"layer_types": ["linear_attention", "hybrid"], "layers_block_type": ["mamba", "hybrid"]},
    "Zamba2ForCausalLM": {"layer_types": ["linear_attention", "hybrid"], "layers_block_type": ["mamba", "hybrid"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"head_dim": None, "qk_dim_factor": 1.0, "v_dim_factor": 1.0, "use_cache": False, "mode": "inference"},
}


NOT_TINY = {
    # class of model: why none is built here
    "BltForCausalLM": "its tables of hashed bytes have no size in its config",
    "CohereCompassForCausalLM": "its default config has no rotary embedding for its layer types",
    "Gemma3nForConditionalGeneration": "needs the package timm",
    "Gemma4AssistantForCausalLM": "has no loss",
    "Gemma4ForConditionalGeneration": "made of several models",
    "Gemma4UnifiedAssistantForCausalLM": "has no loss",
    "Gemma4UnifiedForConditionalGeneration": "made of several models",
    "GitForCausalLM": "made of several models",
    "Phi4MultimodalForCausalLM": "made of several models",
    "Qwen4ExpForCausalLM": "its default config has no sizes for its layers",
    "ZambaForCausalLM": "two layers do not make one",
}


def tiny_config(model_class: Any) -> Any:
    """The default config with the sizes above wherever it has them, and what else the class needs."""
    config_class = model_class.config_class
    default = config_class()
    fixed = {name for name in SIZES if isinstance(getattr(config_class, name, None), property)}
    sizes = {name: size for name, size in SIZES.items() if name not in fixed and _is_number(default, name)}
    changes = sizes | OVERRIDES.get(model_class.__name__, {})
    return config_class(**{name: value for name, value in changes.items() if value is not None})


def _is_number(config: Any, name: str) -> bool:
    try:
        value = getattr(config, name)
    except (AttributeError, RuntimeError):  # absent, or different in every layer
        return False
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def names() -> list[str]:
    """Every class of the mapping, once."""
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({name for entry in mapped for name in ((entry,) if isinstance(entry, str) else entry)})


def build(name: str, **changes: Any) -> Any:
    """A model of this class in training mode, its head scaled up so that a soft cap and a scale of the logits matter.

    Raises:
        ValueError: the sizes above do not make it tiny.
    """
    model_class = getattr(transformers, name)
    config = tiny_config(model_class)
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in model_class(config).parameters())
    if elements > LARGEST:
        raise ValueError(f"{name} would have {elements / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = model_class(config).train()
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Module):
        for parameter in head.parameters():
            parameter.data.mul_(20)
    return model


def batch(model: Any, *, rows: int = 2, length: int = 8, seed: int = 0) -> dict[str, Any]:
    """Token ids, and labels of which the first and some others are masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (rows, length), generator=generator)
    masked = torch.rand(ids.shape, generator=generator) < 0.3
    masked[:, 0] = True
    return {"input_ids": ids, "labels": ids.masked_fill(masked, -100)}


@dataclass
class Step:
    """What one forward and backward pass of a model gives."""

    output: Any
    gradients: dict[str, torch.Tensor]

    @property
    def loss(self) -> torch.Tensor:
        return self.output["loss"].detach()


def step(model: Any, inputs: dict[str, Any], **options: Any) -> Step:
    """Loss and every gradient; the same random numbers in every call."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    output = model(**inputs, **options)
    output["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(output, gradients)


def difference(one: Step, other: Step) -> float:
    """The largest difference of the losses and of any gradient, relative to the largest element of its tensor.

    Gradients that are sums of terms which cancel, a thousandth of the model's largest and less, count relative to that.
    """
    if one.gradients.keys() != other.gradients.keys():
        return math.inf
    pairs = [(one.loss, other.loss), *((one.gradients[name], other.gradients[name]) for name in one.gradients)]
    worst, floor = 0.0, 1e-3 * max(gradient.abs().max().item() for gradient in one.gradients.values())
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        scale = max(a.abs().max().item(), floor)
        worst = max(worst, ((a - b).abs().max() / scale).item())
    return worst


@dataclass(frozen=True)
class Verdict:
    """What `patch` does to a class."""

    name: str
    status: str
    """fused, materialised, refused, or not built."""
    reason: str
    off: float = 0.0
    """`difference` of a patched and an unpatched step."""

    @property
    def row(self) -> dict[str, str]:
        return {"class": self.name, "status": self.status, "reason": self.reason}


def verdict(name: str) -> Verdict:
    """Trains a tiny model of the class for one step without and with the patch."""
    if name in NOT_TINY:
        return Verdict(name, "not built", NOT_TINY[name])
    model = build(name)
    try:
        handle = patch(model)
    except ValueError as error:
        return Verdict(name, "refused", str(error).partition(f"got {name}: ")[2])
    handle.remove()
    inputs = batch(model)
    accepts = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    options = {"num_items_in_batch": torch.tensor(23)} if accepts else {}
    plain = step(model, inputs, **options)
    with patch(model):
        fused = step(model, inputs, **options)
        found = report(model)
    off = difference(plain, fused)
    removed = difference(plain, step(model, inputs, **options))
    return Verdict(name, found.status, found.reason or "", off if removed == 0 else math.inf)


def main() -> None:
    """Write the verdicts on all classes to the documentation."""
    with DATA.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["class", "status", "reason"], lineterminator="\n")
        writer.writeheader()
        for name in names():
            found = verdict(name)
            print(name, found.status, found.reason, f"{found.off:.1e}", flush=True)
            writer.writerow(found.row)


if __name__ == "__main__":
    main()
