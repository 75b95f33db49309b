"""The zoo: which architectures of transformers, built small and with random weights, can be trained privately.

A cell is one model. It is supported if the clipped sums of a batch are those of one example at a time, in float64: both
are computed here, ours and, where it runs, Opacus's. A model that is not taken is shown with what was said.

``zoo-probe`` takes two steps of each in train mode, in three precisions, and shows how far an example's rows lay apart
where another one was exchanged (`lambdacgd.clipping.probe`): what passes for rounding, and false alarms.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.clipping import attach, convert, probe
from lambdacgd.clipping.check import clipped_sum, per_example_gradients
from lambdacgd.clipping.probe import tensors_in
from lambdacgd.errors import ClippingError
from reproduce.framework import Cell, Experiment, Row, Settings

EXAMPLES, TOKENS, WORDS = 6, 10, 50
_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CAUSAL = _TEXT | {"num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
_GPT = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False}
_SEQ = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
_IMAGE = {
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_SPEECH = _TEXT | {
    "conv_dim": (8, 8),
    "conv_stride": (3, 2),
    "conv_kernel": (5, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "feat_extract_norm": "layer",
    "layerdrop": 0.0,
}

#: name -> (configuration, model, kind of input, options of the configuration)
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "BERT": ("BertConfig", "BertForSequenceClassification", "text", _TEXT),
    "BERT (masked words)": ("BertConfig", "BertForMaskedLM", "text", _TEXT),
    "RoBERTa": ("RobertaConfig", "RobertaForSequenceClassification", "text", _TEXT),
    "XLM-RoBERTa-XL": ("XLMRobertaXLConfig", "XLMRobertaXLForSequenceClassification", "text", _TEXT),
    "CamemBERT": ("CamembertConfig", "CamembertForSequenceClassification", "text", _TEXT),
    "ELECTRA": ("ElectraConfig", "ElectraForSequenceClassification", "text", _TEXT | {"embedding_size": 8}),
    "ALBERT": ("AlbertConfig", "AlbertForSequenceClassification", "text", _TEXT | {"embedding_size": 8}),
    "DistilBERT": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        "text",
        {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32},
    ),
    "DeBERTa": (
        "DebertaConfig",
        "DebertaForSequenceClassification",
        "text",
        _TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "pooler_hidden_size": 16},
    ),
    "DeBERTa-v2": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        "text",
        _TEXT
        | {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        }
        | {"pooler_hidden_size": 16, "position_buckets": 8},
    ),
    "MobileBERT": (
        "MobileBertConfig",
        "MobileBertForSequenceClassification",
        "text",
        _TEXT | {"embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1},
    ),
    "SqueezeBERT": (
        "SqueezeBertConfig",
        "SqueezeBertForSequenceClassification",
        "text",
        _TEXT | {"embedding_size": 16},
    ),
    "MPNet": ("MPNetConfig", "MPNetForSequenceClassification", "text", _TEXT),
    "ModernBERT": (
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        "text",
        _TEXT | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "FNet": ("FNetConfig", "FNetForSequenceClassification", "words", _TEXT | {"tpu_short_seq_length": TOKENS}),
    "ConvBERT": (
        "ConvBertConfig",
        "ConvBertForSequenceClassification",
        "text",
        _TEXT | {"embedding_size": 16, "head_ratio": 1},
    ),
    "Funnel": (
        "FunnelConfig",
        "FunnelForSequenceClassification",
        "text",
        {"vocab_size": WORDS, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [1, 1]},
    ),
    "Longformer": ("LongformerConfig", "LongformerForSequenceClassification", "text", _TEXT | {"attention_window": 4}),
    "BigBird": (
        "BigBirdConfig",
        "BigBirdForSequenceClassification",
        "text",
        _TEXT | {"attention_type": "original_full"},
    ),
    "RemBERT": ("RemBertConfig", "RemBertForSequenceClassification", "text", _TEXT | {"input_embedding_size": 8}),
    "RoFormer": ("RoFormerConfig", "RoFormerForSequenceClassification", "text", _TEXT | {"embedding_size": 16}),
    "I-BERT": ("IBertConfig", "IBertForSequenceClassification", "text", _TEXT),
    "Data2Vec text": ("Data2VecTextConfig", "Data2VecTextForSequenceClassification", "text", _TEXT),
    "XLNet": (
        "XLNetConfig",
        "XLNetForSequenceClassification",
        "words",
        {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    ),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", "words", _GPT),
    "GPT-2 (classification)": ("GPT2Config", "GPT2ForSequenceClassification", "words", _GPT | {"pad_token_id": 0}),
    "GPT-Neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        "words",
        _TEXT
        | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}
        | {"use_cache": False},
    ),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", "words", _CAUSAL),
    "GPT-J": ("GPTJConfig", "GPTJForCausalLM", "words", _GPT | {"rotary_dim": 4}),
    "CodeGen": ("CodeGenConfig", "CodeGenForCausalLM", "words", _GPT | {"n_head": 4, "rotary_dim": 2}),
    "BLOOM": (
        "BloomConfig",
        "BloomForCausalLM",
        "words",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "use_cache": False},
    ),
    "OPT": (
        "OPTConfig",
        "OPTForCausalLM",
        "words",
        _TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 16, "use_cache": False},
    ),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", "words", _CAUSAL),
    "Mistral": ("MistralConfig", "MistralForCausalLM", "words", _CAUSAL),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "words", _CAUSAL),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", "words", _CAUSAL),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", "words", _CAUSAL),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", "words", _CAUSAL),
    "Phi": ("PhiConfig", "PhiForCausalLM", "words", _CAUSAL),
    "Phi-3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        "words",
        _CAUSAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "StableLM": ("StableLmConfig", "StableLmForCausalLM", "words", _CAUSAL),
    "Falcon": ("FalconConfig", "FalconForCausalLM", "words", _TEXT | {"use_cache": False}),
    "MPT": (
        "MptConfig",
        "MptForCausalLM",
        "words",
        {"vocab_size": WORDS, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32, "use_cache": False},
    ),
    "OLMo": ("OlmoConfig", "OlmoForCausalLM", "words", _CAUSAL),
    "Cohere": ("CohereConfig", "CohereForCausalLM", "words", _CAUSAL),
    "Granite": ("GraniteConfig", "GraniteForCausalLM", "words", _CAUSAL),
    "Starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", "words", _CAUSAL),
    "Mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        "words",
        _CAUSAL | {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
    "Mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        "words",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
    ),
    "RWKV": (
        "RwkvConfig",
        "RwkvForCausalLM",
        "words",
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "attention_hidden_size": 16,
            "num_hidden_layers": 2,
            "context_length": 32,
            "use_cache": False,
        },
    ),
    "BART": ("BartConfig", "BartForConditionalGeneration", "pair", _SEQ),
    "BART (classification)": ("BartConfig", "BartForSequenceClassification", "sentence", _SEQ),
    "mBART": ("MBartConfig", "MBartForConditionalGeneration", "pair", _SEQ),
    "Pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", "pair", _SEQ),
    "Marian": ("MarianConfig", "MarianMTModel", "pair", _SEQ),
    "Blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration", "pair", _SEQ),
    "T5": (
        "T5Config",
        "T5ForConditionalGeneration",
        "pair",
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "use_cache": False}
        | {"decoder_start_token_id": 0},
    ),
    "ProphetNet": (
        "ProphetNetConfig",
        "ProphetNetForConditionalGeneration",
        "pair",
        {"vocab_size": WORDS, "hidden_size": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_encoder_layers": 2}
        | {"num_decoder_layers": 2, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "ngram": 2}
        | {"max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0, "num_buckets": 8},
    ),
    "Whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "spectrum",
        _SEQ
        | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32, "suppress_tokens": None}
        | {"begin_suppress_tokens": None},
    ),
    "wav2vec 2.0": (
        "Wav2Vec2Config",
        "Wav2Vec2ForSequenceClassification",
        "sound",
        _SPEECH | {"classifier_proj_size": 8},
    ),
    "HuBERT": ("HubertConfig", "HubertForSequenceClassification", "sound", _SPEECH | {"classifier_proj_size": 8}),
    "WavLM": ("WavLMConfig", "WavLMForSequenceClassification", "sound", _SPEECH | {"classifier_proj_size": 8}),
    "AST": (
        "ASTConfig",
        "ASTForAudioClassification",
        "patches",
        {k: v for k, v in _IMAGE.items() if k not in ("image_size", "num_channels")}
        | {"max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
    ),
    "ViT": ("ViTConfig", "ViTForImageClassification", "image", _IMAGE),
    "DeiT": ("DeiTConfig", "DeiTForImageClassification", "image", _IMAGE),
    "BEiT": ("BeitConfig", "BeitForImageClassification", "image", _IMAGE | {"use_relative_position_bias": True}),
    "DINOv2": ("Dinov2Config", "Dinov2ForImageClassification", "image", _IMAGE),
    "Data2Vec vision": ("Data2VecVisionConfig", "Data2VecVisionForImageClassification", "image", _IMAGE),
    "ViT-MSN": ("ViTMSNConfig", "ViTMSNForImageClassification", "image", _IMAGE),
    "SigLIP": ("SiglipVisionConfig", "SiglipVisionModel", "image", _IMAGE),
    "CLIP (vision)": ("CLIPVisionConfig", "CLIPVisionModel", "image", _IMAGE),
    "CLIP (text)": ("CLIPTextConfig", "CLIPTextModel", "words", _TEXT),
    "Swin": (
        "SwinConfig",
        "SwinForImageClassification",
        "image",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2},
    ),
    "Swin V2": (
        "Swinv2Config",
        "Swinv2ForImageClassification",
        "image",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2},
    ),
    "ConvNeXt": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        "image",
        {"image_size": 16, "patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    "ConvNeXt V2": (
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        "image",
        {"image_size": 16, "patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    "PoolFormer": (
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        "image",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "num_encoder_blocks": 2,
        },
    ),
    "SegFormer": (
        "SegformerConfig",
        "SegformerForImageClassification",
        "image",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "PVT": (
        "PvtConfig",
        "PvtForImageClassification",
        "image",
        {
            "image_size": 16,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "ResNet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        "image",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "RegNet": (
        "RegNetConfig",
        "RegNetForImageClassification",
        "image",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    ),
    "MobileNet V2": (
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        "image",
        {"image_size": 32, "depth_multiplier": 0.2},
    ),
    "EfficientNet": (
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        "image",
        {"image_size": 32, "width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256},
    ),
    "TimeSformer": ("TimesformerConfig", "TimesformerForVideoClassification", "video", _IMAGE | {"num_frames": 3}),
    "VideoMAE": (
        "VideoMAEConfig",
        "VideoMAEForVideoClassification",
        "video",
        _IMAGE | {"num_frames": 4, "tubelet_size": 2},
    ),
    "ViViT": (
        "VivitConfig",
        "VivitForVideoClassification",
        "video",
        _IMAGE | {"num_frames": 4, "tubelet_size": [2, 4, 4]},
    ),
    "PatchTST": (
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        "series",
        {
            "num_input_channels": 3,
            "context_length": 12,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "prediction_length": 4,
            "norm_type": "layernorm",
        },
    ),
    "PatchTSMixer": (
        "PatchTSMixerConfig",
        "PatchTSMixerForPrediction",
        "series",
        {
            "num_input_channels": 3,
            "context_length": 12,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_layers": 2,
            "prediction_length": 4,
            "norm_mlp": "LayerNorm",
        },
    ),
    "DETR": (
        "DetrConfig",
        "DetrForObjectDetection",
        "image",
        _SEQ
        | {
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "out_features": ["stage2"],
            },
        },
    ),
    "SAM": (
        "SamVisionConfig",
        "SamVisionModel",
        "image",
        {k: v for k, v in _IMAGE.items() if k != "intermediate_size"}
        | {"mlp_dim": 24, "window_size": 2, "output_channels": 8, "global_attn_indexes": [1]},
    ),
    "Perceiver": (
        "PerceiverConfig",
        "PerceiverForSequenceClassification",
        "text",
        {
            "vocab_size": WORDS,
            "num_latents": 4,
            "d_latents": 16,
            "d_model": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "max_position_embeddings": TOKENS,
        },
    ),
}


def inputs(kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """A batch for a model of that kind."""
    ids = torch.randint(3, WORDS, (EXAMPLES, TOKENS))
    size = options.get("image_size", 16)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return {
        "words": lambda: {"input_ids": ids},
        "text": lambda: {"input_ids": ids, "attention_mask": mask},
        "sentence": lambda: {"input_ids": torch.cat([ids[:, :-1], torch.full((EXAMPLES, 1), 2)], 1)},
        "pair": lambda: {"input_ids": ids, "decoder_input_ids": torch.randint(3, WORDS, (EXAMPLES, 7))},
        "image": lambda: {"pixel_values": torch.randn(EXAMPLES, 3, size, size).double()},
        "video": lambda: {"pixel_values": torch.randn(EXAMPLES, options["num_frames"], 3, size, size).double()},
        "sound": lambda: {"input_values": torch.randn(EXAMPLES, 120).double()},
        "patches": lambda: {"input_values": torch.randn(EXAMPLES, 16, 8).double()},
        "series": lambda: {"past_values": torch.randn(EXAMPLES, 12, 3).double()},
        "spectrum": lambda: {
            "input_features": torch.randn(EXAMPLES, 8, 20).double(),
            "decoder_input_ids": torch.randint(3, WORDS, (EXAMPLES, 7)),
        },
    }[kind]()


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of the zoo with random weights, in float64, and a batch for it."""
    import transformers

    configuration, model, kind, options = MODELS[name]
    torch.manual_seed(1)
    random.seed(1)
    config = getattr(transformers, configuration)(**copy.deepcopy(options))
    made = getattr(transformers, model)(config).double()
    for p in made.parameters():  # some begin as zero or one
        with torch.no_grad():
            p.add_(0.05 * torch.randn_like(p))
    return made, inputs(kind, options)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A bent projection of the model's first output, averaged over each example, then over examples."""
    first = next(x for x in tensors_in(model(**batch)) if x.is_floating_point() and x.requires_grad)
    flat = first.flatten(1)
    direction = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype) + 0.1
    return torch.tanh(flat @ direction / flat.shape[1] ** 0.5).mean() + flat.square().mean(1).mean()


def ours(name: str) -> str:
    """ "yes", or what was said."""
    model, batch = build(name)
    convert(model).eval()  # dropout differs between an example alone and together with others
    expected = per_example_gradients(model, loss, batch, EXAMPLES)
    norms = torch.stack([torch.stack([g.square().sum() for g in e.values()]).sum().sqrt() for e in expected])
    zeta = float(norms.median())
    clipper = attach(model, zeta)
    clipper.backward(loss(model, batch))
    return _same(clipper.take(), clipped_sum(expected, zeta))


def opacus(name: str) -> str:
    """ "yes", or what was said."""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    model, batch = build(name)
    model = ModuleValidator.fix(model) if ModuleValidator.validate(model, strict=False) else model
    _without_dropout(model.double().train())  # it sees layers in train mode only
    expected = per_example_gradients(model, loss, batch, EXAMPLES)
    sampled = GradSampleModule(model)
    loss(sampled, batch).backward()
    norms = torch.stack([torch.stack([g.square().sum() for g in e.values()]).sum().sqrt() for e in expected])
    zeta = float(norms.median())
    grads = {n.removeprefix("_module."): p.grad_sample for n, p in sampled.named_parameters() if p.requires_grad}
    if any(g is None for g in grads.values()):
        used = {n for n in expected[0] if any(e[n].any() for e in expected)}
        if any(grads[n] is None for n in used):
            raise RuntimeError("some parameters got no gradient")
        grads = {n: torch.zeros(EXAMPLES, *expected[0][n].shape) if g is None else g for n, g in grads.items()}
    whole = {n: (torch.stack(g).sum(0) if isinstance(g, list) else g) for n, g in grads.items()}
    for n, g in whole.items():
        if g.shape[0] != EXAMPLES:
            raise RuntimeError(f"gradients of {g.shape[0]} examples for {EXAMPLES} ({n})")
    found = torch.stack([g.flatten(1).square().sum(1) for g in whole.values()]).sum(0).sqrt()
    factor = (zeta / found).clamp_max(1)
    total = {n: torch.einsum("b,b...->...", factor.to(g), g) for n, g in whole.items()}
    return _same(total, clipped_sum(expected, zeta))


def _without_dropout(model: nn.Module) -> None:
    """Every rate of dropout, stochastic depth and layer drop is zero."""
    for module in model.modules():
        held = [module, getattr(module, "config", None)]
        for owner in held:
            for name, value in vars(owner).items() if owner is not None else ():
                if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(owner).__name__)):
                    vars(owner)[name] = 0.0


def _same(sums: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    size = torch.stack([w.square().sum() for w in wanted.values()]).sum().sqrt()
    worst = max(float((sums[n] - wanted[n]).norm() / size) for n in wanted)
    return "yes" if worst < 1e-6 else f"wrong by {worst:.1e}"


def check(cell: Cell, settings: Settings) -> Row:
    """One model, by us and by Opacus."""
    answers: Row = {}
    for who, ask in (("ours", ours), ("opacus", opacus)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                answers[who] = ask(cell["model"])
            except ClippingError as error:
                answers[who] = f"refused: {error}"
            except Exception as error:  # whatever others raise: the table says so
                answers[who] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return answers


def page(rows: list[Row]) -> str:
    """The table of support."""
    lines = ["| model | λCGD | Opacus |", "| --- | --- | --- |"]
    lines += [f"| {r['model']} | {_short(r['ours'])} | {_short(r['opacus'])} |" for r in rows]
    counts = [sum(r[who] == "yes" for r in rows) for who in ("ours", "opacus")]
    return "\n".join([*lines, "", f"Supported: {counts[0]} of {len(rows)} by λCGD, {counts[1]} by Opacus."])


def _short(answer: str) -> str:
    return (
        "yes"
        if answer == "yes"
        else "refused"
        if answer.startswith("refused")
        else "wrong"
        if "wrong" in answer
        else "no"
    )


def cells(settings: Settings) -> Sequence[Cell]:
    """All models; with --quick, every eighth."""
    names = list(MODELS)[::8] if settings.quick else list(MODELS)
    return [{"model": name, "transformers": _version()} for name in names]


def _version() -> str:
    from importlib.metadata import version

    return version("transformers")


EXPERIMENT = Experiment(
    name="zoo",
    what="which architectures of transformers can be trained privately, by us and by Opacus",
    cells=cells,
    compute=check,
    columns=("model", "ours", "opacus"),
    page=page,
    revision=2,
)


# --- two steps in train mode ------------------------------------------------------------------------------------------

PRECISIONS = ("float32", "bfloat16", "autocast")


class Distances:
    """While it is entered, the largest relative distance of rows that the probe compared."""

    def __init__(self) -> None:
        self.largest, self._compare = 0.0, probe.layouts_of

    def __enter__(self) -> Distances:
        probe.layouts_of = self._look
        return self

    def __exit__(self, *error: object) -> None:
        probe.layouts_of = self._compare

    def _look(self, x: Tensor, y: Tensor, count: int, exchanged: int, tolerance: float, floor: float) -> set[str]:
        apart = probe.differences(x, y) if x.shape[0] == y.shape[0] and x.shape[0] % count == 0 else None
        if apart is not None:
            relative, row = apart[0] / apart[1].clamp_min(floor), torch.arange(x.shape[0], device=x.device)
            layouts = row // (x.shape[0] // count) != exchanged, row % count != exchanged
            self.largest = max(self.largest, min(float(relative[rows].max()) for rows in layouts))
        return self._compare(x, y, count, exchanged, tolerance, floor)


def train(cell: Cell, settings: Settings) -> Row:
    """Two probed steps of one model."""
    device, low = torch.device(settings.torch_device), torch.bfloat16
    kind = low if cell["precision"] == "bfloat16" else torch.float32
    with warnings.catch_warnings(), Distances() as distances:
        warnings.simplefilter("ignore")
        model, batch = build(cell["model"])
        convert(model).to(device, kind).train()
        batch = {k: v.to(device, kind) if v.is_floating_point() else v.to(device) for k, v in batch.items()}
        try:
            clipper = attach(model)
            for _ in range(2):
                with torch.autocast(device.type, low, enabled=cell["precision"] == "autocast"):
                    value = loss(model, batch)
                value.float().backward()
                clipper.take()
            said = "yes"
        except ClippingError as error:
            said = f"refused: {error}"
        except Exception as error:  # an operation that has no kernel for 16 bits, say
            said = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return {"distance": distances.largest, "trains": said, "device": device.type}


def trained_page(rows: list[Row]) -> str:
    """Distances by precision, and what was refused."""
    lines = ["| precision | trained | rows apart | largest distance |", "| --- | --- | --- | --- |"]
    for precision in PRECISIONS:
        fine = [r["distance"] for r in rows if r["precision"] == precision and r["trains"] == "yes"]
        lines.append(f"| {precision} | {len(fine)} | {sum(d > 0 for d in fine)} | {max(fine, default=0.0):.1e} |")
    refused = [f"- {r['model']}, {r['precision']}: {r['trains'][:160]}" for r in rows if r["trains"] != "yes"]
    return "\n".join([*lines, "", "Refused:", "", *refused])


def training_cells(settings: Settings) -> Sequence[Cell]:
    """All models in all precisions; with --quick, every eighth model."""
    return [c | {"precision": p, "on": settings.torch_device} for c in cells(settings) for p in PRECISIONS]


TRAINED = Experiment(
    name="zoo-probe",
    what="how far an example's rows lie apart where another one is exchanged, over architectures of transformers",
    cells=training_cells,
    compute=train,
    columns=("model", "precision", "trains", "distance"),
    page=trained_page,
    revision=1,
)
