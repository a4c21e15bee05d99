"""Encoder-decoders, vision, speech, and models of several inputs."""

import torch
from architecture import (
    SEQ2SEQ,
    SPEECH,
    TEXT,
    VISION,
    Architecture,
    captioned_images,
    image_classifier,
    images,
    only_images,
    pairs,
    seq2seq,
    sounds,
    text,
    tokens,
    transcribed_sounds,
)
from torch import Tensor

__all__ = ["OTHER_ARCHITECTURES"]

T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BACKBONE = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1], "num_labels": 5}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2, 1],
    "num_heads": [2, 2, 4],
    "window_size": 4,
    "num_labels": 5,
}
WHISPER = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
TWO_TOWERS = {
    "text_config": {**TEXT, "eos_token_id": 2},
    "vision_config": VISION,
    "projection_dim": 16,
}


def spectrograms(batch_size: int, _: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch_size, 8, 32), "labels": tokens(batch_size, 6)}


def filter_banks(batch_size: int, _: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch_size, 32, 8), "labels": tokens(batch_size, 6)}


def audio_classes(batch_size: int, _: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch_size, 32, 16), "labels": torch.randint(0, 5, (batch_size,))}


def masked_patches(batch_size: int, length: int) -> dict[str, Tensor]:
    return {**only_images(batch_size, length), "noise": torch.rand(batch_size, 16)}


def segmented_images(batch_size: int, length: int) -> dict[str, Tensor]:
    return {**only_images(batch_size, length), "labels": torch.randint(0, 5, (batch_size, 32, 32))}


def captioned(batch_size: int, length: int) -> dict[str, Tensor]:
    return {**captioned_images(batch_size, length), "labels": tokens(batch_size, length)}


def questions(batch_size: int, length: int) -> dict[str, Tensor]:
    return {**captioned_images(batch_size, length), "labels": torch.rand(batch_size, 5)}


def contrastive(output: object) -> Tensor:
    """A loss over the two towers' embeddings, as CLIP's own, without `return_loss`."""
    logits = output.logits_per_text  # type: ignore[attr-defined]
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


OTHER_ARCHITECTURES: dict[str, Architecture] = {
    # encoder-decoders
    "T5": Architecture("T5ForConditionalGeneration", pairs, T5),
    "mT5": Architecture("MT5ForConditionalGeneration", pairs, T5),
    "UMT5": Architecture("UMT5ForConditionalGeneration", pairs, T5),
    "LongT5": Architecture("LongT5ForConditionalGeneration", pairs, {**T5, "local_radius": 4}),
    "Switch": Architecture(
        "SwitchTransformersForConditionalGeneration", pairs, {**T5, "num_experts": 4}, dtype=torch.float32
    ),
    "BART": seq2seq("BartForConditionalGeneration"),
    "mBART": seq2seq("MBartForConditionalGeneration"),
    "Pegasus": seq2seq("PegasusForConditionalGeneration"),
    "Pegasus-X": seq2seq("PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2),
    "Marian": seq2seq("MarianMTModel"),
    "Blenderbot": seq2seq("BlenderbotForConditionalGeneration"),
    "Blenderbot-small": seq2seq("BlenderbotSmallForConditionalGeneration"),
    "M2M-100": seq2seq("M2M100ForConditionalGeneration"),
    "NLLB-MoE": seq2seq(
        "NllbMoeForConditionalGeneration", dtype=torch.float32, num_experts=4, expert_capacity=16
    ),
    "LED": seq2seq(
        "LEDForConditionalGeneration",
        attention_window=[4, 4],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "ProphetNet": Architecture(
        "ProphetNetForConditionalGeneration",
        pairs,
        {
            **{key: value for key, value in SEQ2SEQ.items() if "layers" not in key},
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "ngram": 2,
        },
    ),
    "PLBart": seq2seq("PLBartForConditionalGeneration"),
    "FSMT": Architecture(
        "FSMTForConditionalGeneration",
        text,
        {**SEQ2SEQ, "src_vocab_size": 99, "tgt_vocab_size": 99, "langs": ["en", "de"]},
        dtype=torch.float32,
    ),
    # vision
    "ViT": image_classifier("ViTForImageClassification"),
    "DeiT": image_classifier("DeiTForImageClassification"),
    "BEiT": image_classifier("BeitForImageClassification", use_relative_position_bias=True),
    "DINOv2": image_classifier("Dinov2ForImageClassification"),
    "ViTMAE": Architecture(
        "ViTMAEForPreTraining",
        masked_patches,
        {
            **VISION,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
    ),
    "Swin": Architecture("SwinForImageClassification", images, SWIN),
    "Swinv2": Architecture("Swinv2ForImageClassification", images, SWIN),
    "ResNet": Architecture("ResNetForImageClassification", images, {**BACKBONE, "embedding_size": 8}),
    "RegNet": Architecture(
        "RegNetForImageClassification", images, {**BACKBONE, "embedding_size": 8, "groups_width": 8}
    ),
    "ConvNeXt": Architecture("ConvNextForImageClassification", images, {**BACKBONE, "patch_size": 2}),
    "ConvNeXtV2": Architecture("ConvNextV2ForImageClassification", images, {**BACKBONE, "patch_size": 2}),
    "PoolFormer": Architecture("PoolFormerForImageClassification", images, BACKBONE),
    "MobileNetV2": Architecture(
        "MobileNetV2ForImageClassification", images, {"depth_multiplier": 0.25, "num_labels": 5}
    ),
    "EfficientNet": Architecture(
        "EfficientNetForImageClassification",
        images,
        {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320, "num_labels": 5},
    ),
    "SegFormer": Architecture(
        "SegformerForSemanticSegmentation",
        segmented_images,
        {**BACKBONE, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
    ),
    "PVT": Architecture(
        "PvtForImageClassification",
        images,
        {
            **BACKBONE,
            "image_size": 32,
            "num_attention_heads": [1, 2, 2, 4],
        },
    ),
    "CvT": Architecture(
        "CvtForImageClassification",
        images,
        {
            "embed_dim": [8, 16, 32],
            "num_heads": [1, 2, 4],
            "depth": [1, 2, 3],
            "cls_token": [False, False, True],
            "num_labels": 5,
        },
    ),
    "LeViT": Architecture(
        "LevitForImageClassification",
        images,
        {
            "image_size": 32,
            "hidden_sizes": [16, 32, 32],
            "num_attention_heads": [2, 4, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "num_labels": 5,
        },
        tolerance=1e-7,
    ),  # batch normalisation over a few numbers magnifies the last bit
    "BiT": Architecture(
        "BitForImageClassification",
        images,
        {
            **BACKBONE,
            "embedding_size": 32,
            "num_groups": 4,
        },
    ),
    "MobileViT": Architecture(
        "MobileViTForImageClassification",
        images,
        {
            "image_size": 32,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "num_attention_heads": 4,
            "num_labels": 5,
        },
    ),
    # speech
    "Wav2Vec2": Architecture("Wav2Vec2ForSequenceClassification", sounds, SPEECH),
    "Wav2Vec2-CTC": Architecture("Wav2Vec2ForCTC", transcribed_sounds, SPEECH),
    "HuBERT": Architecture("HubertForSequenceClassification", sounds, SPEECH),
    "WavLM": Architecture("WavLMForSequenceClassification", sounds, SPEECH),
    "SEW": Architecture("SEWForSequenceClassification", sounds, {**SPEECH, "squeeze_factor": 2}),
    "UniSpeech-SAT": Architecture("UniSpeechSatForSequenceClassification", sounds, SPEECH),
    "Data2Vec-audio": Architecture("Data2VecAudioForSequenceClassification", sounds, SPEECH),
    "AST": Architecture(
        "ASTForAudioClassification",
        audio_classes,
        {
            **VISION,
            "patch_size": 8,
            "num_mel_bins": 16,
            "max_length": 32,
            "frequency_stride": 8,
            "time_stride": 8,
        },
    ),
    "Whisper": Architecture("WhisperForConditionalGeneration", spectrograms, WHISPER),
    "Speech2Text": Architecture(
        "Speech2TextForConditionalGeneration",
        filter_banks,
        {
            **SEQ2SEQ,
            "max_source_positions": 64,
            "max_target_positions": 32,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "conv_kernel_sizes": [3, 3],
        },
    ),
    "SpeechT5": Architecture(
        "SpeechT5ForSpeechToText",
        transcribed_sounds,
        {
            **SPEECH,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "decoder_start_token_id": 2,
        },
    ),
    # text with images
    "CLIP": Architecture("CLIPModel", captioned_images, TWO_TOWERS, loss=contrastive),
    "SigLIP": Architecture("SiglipModel", captioned_images, TWO_TOWERS, loss=contrastive),
    "CLIPSeg": Architecture("CLIPSegModel", captioned_images, TWO_TOWERS, loss=contrastive),
    "AltCLIP": Architecture("AltCLIPModel", captioned_images, TWO_TOWERS, loss=contrastive),
    "Chinese-CLIP": Architecture("ChineseCLIPModel", captioned_images, TWO_TOWERS, loss=contrastive),
    # It rounds to float32 inside, so that the last bit of a parameter can turn into 1e-8 of a gradient.
    "BLIP": Architecture("BlipModel", captioned_images, TWO_TOWERS, loss=contrastive, tolerance=1e-6),
    "GIT": Architecture("GitForCausalLM", captioned, {**TEXT, "vision_config": VISION}),
    "ViLT": Architecture("ViltForQuestionAnswering", questions, {**TEXT, **VISION}),
}
