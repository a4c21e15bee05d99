"""Language models: decoders, mixtures of experts, recurrent ones, encoders."""

from types import MethodType
from typing import Any

import torch
from architecture import TEXT, Architecture, decoder, encoder, masked_text, mixture, text
from torch import nn

__all__ = ["TEXT_ARCHITECTURES"]


def without(name: str) -> dict[str, Any]:
    """The usual settings but for one."""
    return {key: value for key, value in TEXT.items() if key != name}


class Reformer(Architecture):
    """Its layers seed the generator anew, which a module keeps to itself."""

    def build(self) -> nn.Module:
        model: Any = super().build()
        encoder = model.reformer.encoder
        encoder.forward = MethodType(torch.random.fork_rng([])(type(encoder).forward), encoder)
        return model


TEXT_ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "GPT-1": decoder("OpenAIGPTLMHeadModel"),
    "GPT-2": decoder("GPT2LMHeadModel"),
    "GPT-Neo": decoder("GPTNeoForCausalLM", num_layers=4, attention_types=[[["global", "local"], 2]]),
    "GPT-J": decoder("GPTJForCausalLM", rotary_dim=4),
    "GPT-NeoX": decoder("GPTNeoXForCausalLM"),
    "GPT-NeoX-Japanese": decoder("GPTNeoXJapaneseForCausalLM"),
    "GPTBigCode": decoder("GPTBigCodeForCausalLM"),
    "CodeGen": decoder("CodeGenForCausalLM", rotary_dim=4),
    "CTRL": decoder("CTRLLMHeadModel", dff=48),
    "Bloom": decoder("BloomForCausalLM"),
    "OPT": decoder("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32),
    "XGLM": decoder("XGLMForCausalLM", dtype=torch.float32, ffn_dim=48),
    "BioGPT": decoder("BioGptForCausalLM"),
    "MPT": decoder("MptForCausalLM"),
    "Falcon": decoder("FalconForCausalLM"),
    "Phi": decoder("PhiForCausalLM"),
    "Phi3": decoder("Phi3ForCausalLM"),
    "Llama": decoder("LlamaForCausalLM"),
    "Mistral": decoder("MistralForCausalLM", sliding_window=6),
    "Qwen2": decoder("Qwen2ForCausalLM"),
    "Qwen3": decoder("Qwen3ForCausalLM", head_dim=8),
    "Gemma": decoder("GemmaForCausalLM", head_dim=8),
    "Gemma2": decoder("Gemma2ForCausalLM", head_dim=8, sliding_window=6),
    "Gemma3": decoder("Gemma3ForCausalLM", head_dim=8, sliding_window=6),
    "StableLM": decoder("StableLmForCausalLM"),
    "Olmo": decoder("OlmoForCausalLM"),
    "Olmo2": decoder("Olmo2ForCausalLM"),
    "Olmo3": decoder("Olmo3ForCausalLM", sliding_window=6),
    "Cohere": decoder("CohereForCausalLM"),
    "Cohere2": decoder("Cohere2ForCausalLM", sliding_window=6),
    "Granite": decoder("GraniteForCausalLM"),
    "Starcoder2": decoder("Starcoder2ForCausalLM"),
    "Persimmon": decoder("PersimmonForCausalLM"),
    "Nemotron": decoder("NemotronForCausalLM"),
    "GLM": decoder("GlmForCausalLM", head_dim=8),
    "Helium": decoder("HeliumForCausalLM", head_dim=8),
    "SmolLM3": decoder("SmolLM3ForCausalLM"),
    "EXAONE4": decoder("Exaone4ForCausalLM", sliding_window=6),
    "Apertus": decoder("ApertusForCausalLM"),
    "ModernBERT-decoder": decoder("ModernBertDecoderForCausalLM"),
    # mixtures of experts
    "Mixtral": mixture("MixtralForCausalLM"),
    "Qwen2-MoE": mixture("Qwen2MoeForCausalLM", shared_expert_intermediate_size=16),
    "Qwen3-MoE": mixture("Qwen3MoeForCausalLM", head_dim=8),
    "OLMoE": mixture("OlmoeForCausalLM"),
    "GraniteMoE": mixture("GraniteMoeForCausalLM"),
    "PhiMoE": mixture("PhimoeForCausalLM"),
    "GPT-OSS": mixture("GptOssForCausalLM", head_dim=8, sliding_window=6),
    "DeepSeek-V2": mixture(
        "DeepseekV2ForCausalLM",
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        head_dim=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    "DeepSeek-V3": mixture(
        "DeepseekV3ForCausalLM",
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        head_dim=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    "MiniMax": mixture("MiniMaxForCausalLM", head_dim=8),
    # state space, recurrence, and mixtures of these with attention
    "Mamba": decoder("MambaForCausalLM", state_size=4),
    "Mamba2": decoder("Mamba2ForCausalLM", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "FalconMamba": decoder("FalconMambaForCausalLM", state_size=4),
    "RWKV": decoder("RwkvForCausalLM", attention_hidden_size=32),
    "RecurrentGemma": decoder("RecurrentGemmaForCausalLM", lru_width=32, head_dim=8, attention_window_size=6),
    "Jamba": mixture(
        "JambaForCausalLM",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "Bamba": decoder(
        "BambaForCausalLM",
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    "Qwen3-Next": mixture(
        "Qwen3NextForCausalLM",
        head_dim=8,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "LFM2": decoder("Lfm2ForCausalLM", full_attn_idxs=[1, 3], block_multiple_of=8),
    # encoders
    "BERT": encoder("BertForMaskedLM"),
    "RoBERTa": encoder("RobertaForMaskedLM"),
    "CamemBERT": encoder("CamembertForMaskedLM"),
    "XLM-RoBERTa-XL": encoder("XLMRobertaXLForMaskedLM"),
    "ALBERT": encoder("AlbertForMaskedLM", embedding_size=16),
    "ELECTRA": encoder("ElectraForMaskedLM", embedding_size=16),
    "DeBERTa": encoder("DebertaForMaskedLM", relative_attention=True, pos_att_type="c2p|p2c"),
    "DeBERTa-v2": encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type="c2p|p2c"),
    "DistilBERT": encoder("DistilBertForMaskedLM", hidden_dim=48),
    "MPNet": encoder("MPNetForMaskedLM"),
    "MobileBERT": encoder(
        "MobileBertForMaskedLM", intra_bottleneck_size=32, embedding_size=32, num_feedforward_networks=2
    ),
    "SqueezeBERT": encoder("SqueezeBertForMaskedLM", embedding_size=32),
    "ConvBERT": encoder("ConvBertForMaskedLM", embedding_size=32),
    "ModernBERT": encoder("ModernBertForMaskedLM", cls_token_id=1, sep_token_id=2),
    "Nystromformer": encoder("NystromformerForMaskedLM", segment_means_seq_len=64, num_landmarks=64),
    "FNet": Architecture("FNetForMaskedLM", text, TEXT),
    "XLNet": Architecture(
        "XLNetLMHeadModel", masked_text, {**without("max_position_embeddings"), "d_head": 8, "d_inner": 48}
    ),
    "XLM": encoder("XLMWithLMHeadModel"),
    "Longformer": encoder("LongformerForMaskedLM", attention_window=4),
    "BigBird": encoder("BigBirdForMaskedLM", attention_type="original_full"),
    "Funnel": Architecture(
        "FunnelForMaskedLM",
        masked_text,
        {
            **without("num_hidden_layers"),
            "block_sizes": [2, 2],
            "num_decoder_layers": 2,
            "d_head": 8,
            "d_inner": 48,
        },
    ),
    "RoFormer": encoder("RoFormerForMaskedLM", embedding_size=32),
    "RemBERT": encoder("RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=16),
    "ESM": encoder("EsmForMaskedLM", mask_token_id=3),
    "Reformer": Reformer(
        "ReformerModelWithLMHead",
        text,
        TEXT
        | {
            "is_decoder": True,
            "attention_head_size": 8,
            "feed_forward_size": 48,
            "attn_layers": ["local", "local", "local", "local"],
            "axial_pos_embds": False,
            "local_attn_chunk_length": 4,
        },
    ),
}
