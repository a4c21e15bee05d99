"""Models of folders that no rule was made for: held out, and tried once the rules stood."""

import torch
from architecture import (
    SPEECH,
    TEXT,
    Architecture,
    decoder,
    encoder,
    image_classifier,
    mixture,
    seq2seq,
    sounds,
    tokens,
)
from torch import Tensor

__all__ = ["FURTHER_ARCHITECTURES"]


def classes(batch_size: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch_size, length), "labels": torch.randint(0, 2, (batch_size,))}


_DECODERS = """
    ArceeForCausalLM BertGenerationDecoder BitNetForCausalLM CwmForCausalLM DiffLlamaForCausalLM
    DogeForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM ErnieForCausalLM FuyuForCausalLM
    Gemma4UnifiedForCausalLM Glm4ForCausalLM GraniteSWAForCausalLM HrmTextForCausalLM
    HyperCLOVAXForCausalLM Jais2ForCausalLM JetMoeForCausalLM Lfm3ForCausalLM Llama4ForCausalLM
    MegatronBertForCausalLM Ministral3ForCausalLM MllamaForCausalLM NanoChatForCausalLM
    OlmoHybridForCausalLM Qwen3_5ForCausalLM RobertaPreLayerNormForCausalLM SeedOssForCausalLM
    TrOCRForCausalLM VaultGemmaForCausalLM XLMRobertaForCausalLM
""".split()
_MIXTURES = """
    AfmoeForCausalLM AriaTextForCausalLM Cohere2MoeForCausalLM Ernie4_5_MoeForCausalLM
    ExaoneMoeForCausalLM FlexOlmoForCausalLM FlintForCausalLM Glm4MoeForCausalLM
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM HYV3ForCausalLM Inkling2ForCausalLM
    InklingForCausalLM Kolibri1ForCausalLM LagunaForCausalLM MellumForCausalLM
    MiMoV2FlashForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM NemotronHForCausalLM
    Qwen3_5MoeForCausalLM SolarOpenForCausalLM
""".split()
_ENCODERS = """
    EuroBertForMaskedLM FlaubertWithLMHeadModel GteForMaskedLM IBertForMaskedLM
    JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM MraForMaskedLM NeoMMEForMaskedLM
    NomicBertForMaskedLM TapasForMaskedLM UltrabertForMaskedLM YosoForMaskedLM
""".split()
_OF_PICTURES = """
    Dinov2WithRegistersForImageClassification IJepaForImageClassification ViTMSNForImageClassification
""".split()
_OF_SOUNDS = """
    SEWDForSequenceClassification UniSpeechForSequenceClassification
    Wav2Vec2ConformerForSequenceClassification
""".split()

FURTHER_ARCHITECTURES: dict[str, Architecture] = {
    **{name: decoder(name) for name in _DECODERS},
    **{name: mixture(name) for name in _MIXTURES},
    **{name: encoder(name) for name in _ENCODERS},
    **{name: image_classifier(name) for name in _OF_PICTURES},
    **{name: Architecture(name, sounds, SPEECH) for name in _OF_SOUNDS},
    "MvpForConditionalGeneration": seq2seq("MvpForConditionalGeneration"),
    "CanineForSequenceClassification": Architecture("CanineForSequenceClassification", classes, TEXT),
    "MarkupLMForSequenceClassification": Architecture("MarkupLMForSequenceClassification", classes, TEXT),
}
"""By the class's name, with random weights and the usual settings."""
