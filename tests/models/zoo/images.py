"""Tiny models of images of timm, torchvision, diffusers and vit-pytorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.entry import ALL, Entry, numbers, of

PICTURES = numbers(3, 32, 32)


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2, "num_classes": 10}
    return MlpMixer(**sizes)  # type: ignore[no-any-return]


ALL["timm: MlpMixer"] = Entry("timm: MlpMixer", mixer, PICTURES, packages=("timm",))

# ---------------------------------------------------------------------------------------------- timm and torchvision
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}
of("timm", "timm:create_model", PICTURES, "vit_tiny_patch16_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "deit3_small_patch16_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "eva02_tiny_patch14_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "beit_base_patch16_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "cait_xxs24_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "xcit_nano_12_p16_224", **SMALL_VIT | {"patch_size": 16})
of(
    "timm",
    "timm:create_model",
    PICTURES,
    "swin_tiny_patch4_window7_224",
    img_size=32,
    patch_size=4,
    window_size=4,
    embed_dim=16,
    depths=(1, 2),
    num_heads=(2, 4),
    num_classes=10,
)
of("timm", "timm:create_model", PICTURES, "convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), num_classes=10)
of("timm", "timm:create_model", PICTURES, "efficientnet_lite0", num_classes=10)
of(
    "timm",
    "timm:create_model",
    PICTURES,
    "edgenext_xx_small",
    num_classes=10,
    dims=(8, 16, 16, 32),
    depths=(1, 1, 1, 1),
    heads=(2, 2, 2, 2),
)
of("torchvision", "torchvision.models:VisionTransformer", PICTURES, 32, 8, 2, 4, 32, 64, num_classes=10)
of("torchvision", "torchvision.models:SwinTransformer", PICTURES, [4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=10)
of("torchvision", "torchvision.models:MaxVit", PICTURES, (32, 32), 8, 4, [16, 16], [1, 1], 8, 0.0, num_classes=10)
of("torchvision", "torchvision.models:resnet18", PICTURES, num_classes=10, batches=(2, 3))
of("torchvision", "torchvision.models:squeezenet1_1", numbers(3, 48, 48), num_classes=10, dropout=0.0)
of("torchvision", "torchvision.models:mnasnet0_5", PICTURES, num_classes=10, dropout=0.0)

# -------------------------------------------------------------------------------------------------------- diffusers


def noisy(*sizes: int, text: int = 0, **more: Any) -> Callable[[int], dict[str, Any]]:
    def made(b: int) -> dict[str, Any]:
        given = {"sample" if text >= 0 else "hidden_states": torch.randn(b, *sizes), "timestep": torch.arange(b)}
        given |= {"encoder_hidden_states": torch.randn(b, 5, abs(text))} if text else {}
        return given | {key: make(b) for key, make in more.items()} | {"return_dict": False}

    return made


UNET = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
of(
    "diffusers",
    "diffusers:UNet2DModel",
    noisy(3, 8, 8),
    **UNET,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=8,
)
of(
    "diffusers",
    "diffusers:UNet2DConditionModel",
    noisy(4, 8, 8, text=24),
    **UNET,
    cross_attention_dim=24,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    attention_head_dim=4,
)
of(
    "diffusers",
    "diffusers:AutoencoderKL",
    lambda b: {"sample": torch.randn(b, 3, 16, 16), "return_dict": False},
    block_out_channels=(16, 16),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    norm_num_groups=8,
)
of(
    "diffusers",
    "diffusers:VQModel",
    lambda b: {"sample": torch.randn(b, 3, 8, 8), "return_dict": False},
    block_out_channels=(16,),
    norm_num_groups=8,
    num_vq_embeddings=16,
)
of(
    "diffusers",
    "diffusers:PixArtTransformer2DModel",
    noisy(4, 8, 8, text=-24),
    num_attention_heads=4,
    attention_head_dim=8,
    in_channels=4,
    out_channels=8,
    num_layers=2,
    cross_attention_dim=32,
    sample_size=8,
    caption_channels=24,
    use_additional_conditions=False,
)
of(
    "diffusers",
    "diffusers:PriorTransformer",
    lambda b: {
        "hidden_states": torch.randn(b, 16),
        "timestep": torch.arange(b),
        "proj_embedding": torch.randn(b, 16),
        "encoder_hidden_states": torch.randn(b, 6, 16),
        "return_dict": False,
    },
    num_attention_heads=4,
    attention_head_dim=8,
    num_layers=2,
    embedding_dim=16,
    num_embeddings=6,
    additional_embeddings=4,
)
of(
    "diffusers",
    "diffusers:T5FilmDecoder",
    lambda b: {
        "encodings_and_masks": [(torch.randn(b, 6, 32), torch.ones(b, 6))],
        "decoder_input_tokens": torch.randn(b, 8, 16),
        "decoder_noise_time": torch.rand(b),
    },
    input_dims=16,
    targets_length=8,
    d_model=32,
    num_layers=2,
    num_heads=4,
    d_kv=8,
    d_ff=64,
    dropout_rate=0.0,
)

# ------------------------------------------------------------------------------------------- transformers of lucidrains
VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
for where, kind, more in (
    ("vit", "ViT", {}),
    ("simple_vit", "SimpleViT", {}),
    ("deepvit", "DeepViT", {}),
    ("cait", "CaiT", {"cls_depth": 1}),
    ("parallel_vit", "ViT", {}),
    ("vit_for_small_dataset", "ViT", {}),
    ("rvt", "RvT", {}),
    ("simple_vit_with_register_tokens", "SimpleViT", {}),
    ("vit_with_patch_merger", "ViT", {}),
    ("simple_vit_with_fft", "SimpleViT", {"freq_patch_size": 8}),
    ("normalized_vit", "nViT", {}),
):
    of(f"vit-pytorch {where}", f"vit_pytorch.{where}:{kind}", PICTURES, **{**VIT, **more} if kind != "nViT" else VIT)
of(
    "vit-pytorch",
    "vit_pytorch.twins_svt:TwinsSVT",
    numbers(3, 64, 64),
    num_classes=10,
    batches=(2, 3),
    **{f"s{i}_{k}": v for i in (1, 2, 3, 4) for k, v in (("emb_dim", 16), ("depth", 1))},
    s1_local_patch_size=4,
    s2_local_patch_size=2,
    s3_local_patch_size=2,
    s1_global_k=4,
    s2_global_k=2,
    s3_global_k=2,
    s4_global_k=2,
)
of(
    "vit-pytorch",
    "vit_pytorch.cct:CCT",
    PICTURES,
    img_size=32,
    embedding_dim=32,
    n_conv_layers=1,
    num_layers=2,
    num_heads=4,
    mlp_ratio=2.0,
    num_classes=10,
    stochastic_depth=0.0,
    dropout_rate=0.0,
    attention_dropout=0.0,
)
