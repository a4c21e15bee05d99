"""Small models of other libraries than transformers, made as their users make them, with random weights."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import Recipe

__all__ = ["LIBRARY_MODELS", "LibraryModel"]

CLASSES = 5
VOCABULARY = 64
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class LibraryModel:
    """A model of a library and what it is trained on."""

    module: str
    name: str
    settings: dict[str, Any]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]

    def build(self) -> nn.Module:
        """Where only the ranks import the library."""
        return getattr(importlib.import_module(self.module), self.name)(**self.settings)

    def recipe(self) -> Recipe:
        """For `transparency.differences`. Some compute their losses in float32 whatever their type."""
        return Recipe(
            build=self.build,
            batch=lambda batch_size, _: self.batch(batch_size),
            loss=self.loss,
            tolerance=1e-8,
            loss_tolerance=1e-6,
        )


def pictures(batch_size: int, *, size: int = 64, channels: int = 3, dims: int = 2) -> Batch:
    return {
        "x": torch.randn(batch_size, channels, *[size] * dims),
        "classes": torch.randint(0, CLASSES, (batch_size,)),
    }


def words(batch_size: int) -> Batch:
    return {"x": torch.randint(0, VOCABULARY, (batch_size, 12))}


def noisy(batch_size: int) -> Batch:
    """Pictures with noise, the time at which they have it, and a text that describes them."""
    return {
        "x": torch.randn(batch_size, 4, 16, 16),
        "time": torch.randint(0, 1000, (batch_size,)),
        "text": torch.randn(batch_size, 6, 32),
        "summary": torch.randn(batch_size, 32),
        "classes": torch.randint(0, CLASSES, (batch_size,)),
    }


def boxes(batch_size: int) -> Batch:
    """Pictures with one thing on each."""
    return {
        "x": torch.rand(batch_size, 3, 64, 64),
        "boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]).repeat(batch_size, 1, 1),
        "labels": torch.ones(batch_size, 1, dtype=torch.int64),
    }


def classify(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["x"])
    return F.cross_entropy(output[0] if isinstance(output, tuple) else output, batch["classes"])


def classify_with_heads_between(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["x"])
    heads = (F.cross_entropy(head, batch["classes"]) for head in output[1:] if head is not None)
    return F.cross_entropy(output.logits, batch["classes"]) + 0.4 * sum(heads)


def segment(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["x"])
    if isinstance(output, dict):
        return sum(part.square().mean() for part in output.values())
    scores = output[0] if isinstance(output, list | tuple) else output
    return scores.square().mean() + 0.01 * (scores.softmax(1)[:, 0] * batch["x"].mean()).sum()


def detect(model: nn.Module, batch: Batch) -> Tensor:
    things = [
        {"boxes": where, "labels": what} for where, what in zip(batch["boxes"], batch["labels"], strict=True)
    ]
    return sum(model(list(batch["x"]), things).values())


def predict_words(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["x"])


def denoise(*names: str) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of a diffusion model whose arguments beside the picture are these: ``"argument=tensor"``."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        pairs = (name.split("=") for name in names)
        found = model(batch["x"], **{argument: batch[key] for argument, key in pairs}).sample
        return (found - batch["x"][:, : found.shape[1]]).square().mean()

    return loss


def timm(name: str, size: int) -> LibraryModel:
    return LibraryModel(
        "libraries", "timm_model", {"name": name, "size": size}, partial(pictures, size=size), classify
    )


def timm_model(name: str, size: int) -> nn.Module:
    library = importlib.import_module("timm")
    try:
        return library.create_model(name, num_classes=CLASSES, img_size=size)
    except TypeError:  # it takes pictures of any size
        return library.create_model(name, num_classes=CLASSES)


def torchvision(
    name: str, *, loss: Callable[[nn.Module, Batch], Tensor] = classify, **options: Any
) -> LibraryModel:
    sizes = {key: options.pop(key) for key in ("size", "dims") if key in options}
    settings = {"name": name, "weights": None, "num_classes": CLASSES, **options}
    batch = boxes if loss is detect else partial(pictures, **sizes)
    return LibraryModel("torchvision.models", "get_model", settings, batch, loss)


def segmentation(name: str) -> LibraryModel:
    settings = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 3}
    return LibraryModel("segmentation_models_pytorch", name, settings, pictures, segment)


def monai(name: str, *, size: int = 16, **settings: Any) -> LibraryModel:
    volumes = partial(pictures, size=size, channels=1, dims=3)
    return LibraryModel("monai.networks.nets", name, settings, volumes, segment)


def vit_pytorch(module: str, name: str = "ViT", **settings: Any) -> LibraryModel:
    vit = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES, "dim": 32, "depth": 4, "heads": 4}
    settings = {**vit, "mlp_dim": 64, **settings}
    return LibraryModel(f"vit_pytorch.{module}", name, settings, partial(pictures, size=32), classify)


def x_transformers(**attention: Any) -> LibraryModel:
    return LibraryModel("libraries", "decoder", attention, words, predict_words)


def decoder(**attention: Any) -> nn.Module:
    x = importlib.import_module("x_transformers")
    layers = x.Decoder(dim=32, depth=4, heads=4, **attention)
    return x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers)


TIMM = """
    test_byobnet convmixer_768_32 test_convnext cpubone_nano cspnext_tiny davit_tiny dla34 dpn68
    test_efficientnet efficientvim_m1 efficientvit_b0 fasternet_s focalnet_tiny_lrf ghostnet_050
    hardcorenas_a hgnet_tiny hrnet_w18_small iformer_s inception_next_atto lcnetv2_small lowformer_b0
    test_mambaout caformer_s18 tf_mobilenetv3_small_minimal_100 nextvit_small test_nfnet pvt_v2_b0
    rdnet_tiny regnety_040_sgn repghostnet_050 repvit_m1_0 res2net50_26w_4s resnest26d test_resnet
    resnetv2_18 rexnet_100 selecsls42 shvit_s1 skresnet18 starnet_s1 tiny_vit_5m_224 tresnet_l
    ese_vovnet19b_slim cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformerv2_s0
    efficientvit_m0 eva02_tiny_patch14_224 gcvit_tiny hiera_tiny_224 levit_384_s8 gmlp_s16_224 mvitv2_tiny
    nest_tiny pit_xs_224 sequencer2d_s swiftformer_xs tnt_s_patch16_224 twins_svt_small visformer_tiny
    vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224
""".split()
TIMM_SIZES = {
    **dict.fromkeys(TIMM, 64),
    **dict.fromkeys(("csatv2", "cs3darknet_s", "edgenext_xx_small", "fastvit_s12", "sam2_hiera_tiny"), 96),
    **dict.fromkeys(("inception_resnet_v2", "inception_v4", "mobilevit_xxs"), 96),
    "inception_v3": 144,  # smaller ones leave its norms two numbers a channel, whose last bits decide
    **dict.fromkeys(("legacy_xception", "xception41"), 96),
    **dict.fromkeys(("swin_s3_tiny_224", "swinv2_cr_tiny_224"), 112),
    **dict.fromkeys(("test_maxvit", "test_vit", "test_vit_relpos"), 160),
    "swinv2_tiny_window8_256": 128,
    "efficientformer_l1": 224,
    "crossvit_tiny_240": 240,
    "halonet26t": 256,
}
TORCHVISION_CLASSIFIERS = """
    alexnet convnext_tiny densenet121 efficientnet_b0 mnasnet0_5 mobilenet_v2 mobilenet_v3_small
    regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 vgg11_bn swin_t swin_v2_t
""".split()
TORCHVISION: dict[str, dict[str, Any]] = {
    **{name: {} for name in TORCHVISION_CLASSIFIERS},
    "vit_b_16": {"image_size": 32, "size": 32},
    "r3d_18": {"size": 16, "dims": 3},
    "r2plus1d_18": {"size": 16, "dims": 3},
    "googlenet": {"aux_logits": True, "init_weights": False, "loss": classify_with_heads_between},
    "deeplabv3_mobilenet_v3_large": {"weights_backbone": None, "loss": segment},
    "lraspp_mobilenet_v3_large": {"weights_backbone": None, "loss": segment},
    "retinanet_resnet50_fpn": {"weights_backbone": None, "min_size": 64, "max_size": 64, "loss": detect},
}
SEGMENTATION = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3Plus UPerNet".split()
IN_OUT = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
MONAI: dict[str, dict[str, Any]] = {
    "UNet": {**IN_OUT, "channels": (8, 16, 32, 64), "strides": (2, 2, 2), "num_res_units": 2},
    "BasicUNet": {**IN_OUT, "features": (8, 8, 16, 32, 64, 8), "size": 32},
    "AttentionUnet": {**IN_OUT, "channels": (8, 16, 32), "strides": (2, 2)},
    "SegResNet": {**IN_OUT, "init_filters": 8},
    "HighResNet": IN_OUT,
    "UNETR": {
        "in_channels": 1,
        "out_channels": 2,
        "img_size": (16, 16, 16),
        "feature_size": 8,
        "hidden_size": 48,
        "mlp_dim": 96,
        "num_heads": 4,
    },
}
VIT_PYTORCH: dict[str, dict[str, Any]] = {
    "vit": {},
    "deepvit": {"name": "DeepViT"},
    "vit_for_small_dataset": {},
    "simple_vit": {"name": "SimpleViT"},
    "simple_vit_with_register_tokens": {"name": "SimpleViT"},
    "simple_vit_with_qk_norm": {"name": "SimpleViT"},
    "parallel_vit": {},
    "cait": {"name": "CaiT", "cls_depth": 2},
    "xcit": {"name": "XCiT", "cls_depth": 2},
}
X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "bias of T5": {"rel_pos_bias": True},
    "macaron": {"macaron": True},
    "SwiGLU": {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
    "sandwich": {"sandwich_coef": 2},
    "shifted tokens": {"shift_tokens": 1},
    "talking heads": {"attn_pre_talking_heads": True},
    "hyper-connections": {"num_residual_streams": 2},
    "value residual": {"add_value_residual": True},
}

UNET: dict[str, Any] = {
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
DIT: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
}
DIFFUSERS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "UNet2DModel": (
        {
            **UNET,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        ["timestep=time"],
    ),
    "UNet2DConditionModel": (
        {
            **UNET,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 32,
        },
        ["timestep=time", "encoder_hidden_states=text"],
    ),
    "DiTTransformer2DModel": (
        {**DIT, "norm_num_groups": 4},
        ["timestep=time", "class_labels=classes"],
    ),
    "SD3Transformer2DModel": (
        {**DIT, "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 32},
        ["timestep=time", "encoder_hidden_states=text", "pooled_projections=summary"],
    ),
}

LIBRARY_MODELS: dict[str, LibraryModel] = {
    **{f"timm {name}": timm(name, size) for name, size in TIMM_SIZES.items()},
    **{f"torchvision {name}": torchvision(name, **options) for name, options in TORCHVISION.items()},
    **{f"segmentation_models {name}": segmentation(name) for name in SEGMENTATION},
    **{f"monai {name}": monai(name, **settings) for name, settings in MONAI.items()},
    **{f"vit_pytorch {module}": vit_pytorch(module, **settings) for module, settings in VIT_PYTORCH.items()},
    **{f"x_transformers {name}": x_transformers(**settings) for name, settings in X_TRANSFORMERS.items()},
    **{
        f"diffusers {name}": LibraryModel("diffusers", name, settings, noisy, denoise(*arguments))
        for name, (settings, arguments) in DIFFUSERS.items()
    },
}
