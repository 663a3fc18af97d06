"""Tiny models of packages, as their users make them; one whose package is not installed is left out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from zoo.entry import ALL, Entry, numbers


PICTURES, TOKENS = numbers(3, 32, 32), numbers(8, 32)


def of(
    package: str, path: str, inputs: Callable[[int], Any], *args: Any, batches: tuple[int, int] = (4, 6), **kwargs: Any
) -> None:
    """Put `path` of a package, called with arguments, into the record; "module:name.of.it"."""
    module, _, names = path.partition(":")

    def make() -> nn.Module:
        made = importlib.import_module(module)
        for name in names.split("."):
            made = getattr(made, name)
        return made(*args, **kwargs)  # type: ignore[operator, no-any-return]

    name = f"{package}: {args[0] if names == 'create_model' else names}"
    ALL[name] = Entry(name, make, inputs, batches, (module.partition(".")[0],))


def mixer(kind: str) -> None:
    """MLP-Mixer, gMLP and ResMLP of timm, which differ in their block."""

    def make() -> nn.Module:
        from timm.models import mlp_mixer

        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2, "num_classes": 10}
        return mlp_mixer.MlpMixer(block_layer=getattr(mlp_mixer, kind), **sizes)  # type: ignore[no-any-return]

    ALL[f"timm: {kind}"] = Entry(f"timm: {kind}", make, PICTURES, packages=("timm",))


def words(length: int, count: int = 64) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda b: (torch.randint(count, (b, length)),)


# ---------------------------------------------------------------------------------------------- timm and torchvision
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}
of("timm", "timm:create_model", PICTURES, "vit_tiny_patch16_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "deit3_small_patch16_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "eva02_tiny_patch14_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "beit_base_patch16_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "cait_xxs24_224", **SMALL_VIT)
of("timm", "timm:create_model", PICTURES, "xcit_nano_12_p16_224", **SMALL_VIT | {"patch_size": 16})
for kind in ("MixerBlock", "SpatialGatingBlock", "ResBlock"):
    mixer(kind)
of("timm", "timm:create_model", PICTURES, "swin_tiny_patch4_window7_224", img_size=32, patch_size=4, window_size=4,
   embed_dim=16, depths=(1, 2), num_heads=(2, 4), num_classes=10)  # fmt: skip
of("timm", "timm:create_model", PICTURES, "convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), num_classes=10)
of("timm", "timm:create_model", PICTURES, "poolformer_s12", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=10)
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
of("diffusers", "diffusers:UNet2DModel", noisy(3, 8, 8), **UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
   up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8)  # fmt: skip
of("diffusers", "diffusers:UNet2DConditionModel", noisy(4, 8, 8, text=24), **UNET, cross_attention_dim=24,
   down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
   attention_head_dim=4)  # fmt: skip
of("diffusers", "diffusers:AutoencoderKL", lambda b: {"sample": torch.randn(b, 3, 16, 16), "return_dict": False},
   block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
   norm_num_groups=8)  # fmt: skip
of("diffusers", "diffusers:VQModel", lambda b: {"sample": torch.randn(b, 3, 8, 8), "return_dict": False},
   block_out_channels=(16,), norm_num_groups=8, num_vq_embeddings=16)  # fmt: skip
of("diffusers", "diffusers:PixArtTransformer2DModel", noisy(4, 8, 8, text=-24), num_attention_heads=4,
   attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=32, sample_size=8,
   caption_channels=24, use_additional_conditions=False)  # fmt: skip
of("diffusers", "diffusers:PriorTransformer", lambda b: {
    "hidden_states": torch.randn(b, 16), "timestep": torch.arange(b), "proj_embedding": torch.randn(b, 16),
    "encoder_hidden_states": torch.randn(b, 6, 16), "return_dict": False}, num_attention_heads=4,
   attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=6, additional_embeddings=4)  # fmt: skip
of("diffusers", "diffusers:T5FilmDecoder", lambda b: {
    "encodings_and_masks": [(torch.randn(b, 6, 32), torch.ones(b, 6))], "decoder_input_tokens": torch.randn(b, 8, 16),
    "decoder_noise_time": torch.rand(b)}, input_dims=16, targets_length=8, d_model=32, num_layers=2, num_heads=4,
   d_kv=8, d_ff=64, dropout_rate=0.0)  # fmt: skip
of("diffusers", "diffusers:UNet1DModel", lambda b: {"sample": torch.randn(b, 2, 64), "timestep": torch.arange(b), "return_dict": False},
   sample_size=64, in_channels=2, out_channels=2, extra_in_channels=32, block_out_channels=(16, 16),
   down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"), up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"))  # fmt: skip

# ------------------------------------------------------------------------------------------- transformers of lucidrains
VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
for where, kind, more in (
    ("vit", "ViT", {}), ("simple_vit", "SimpleViT", {}), ("deepvit", "DeepViT", {}), ("cait", "CaiT", {"cls_depth": 1}),
    ("parallel_vit", "ViT", {}), ("vit_for_small_dataset", "ViT", {}), ("rvt", "RvT", {}),
    ("simple_vit_with_register_tokens", "SimpleViT", {}), ("vit_with_patch_merger", "ViT", {}),
    ("simple_vit_with_fft", "SimpleViT", {"freq_patch_size": 8}), ("normalized_vit", "nViT", {}),
):  # fmt: skip
    of(f"vit-pytorch {where}", f"vit_pytorch.{where}:{kind}", PICTURES, **{**VIT, **more} if kind != "nViT" else VIT)
of("vit-pytorch", "vit_pytorch.twins_svt:TwinsSVT", numbers(3, 64, 64), num_classes=10, batches=(2, 3),
   **{f"s{i}_{k}": v for i in (1, 2, 3, 4) for k, v in (("emb_dim", 16), ("depth", 1))}, s1_local_patch_size=4,
   s2_local_patch_size=2, s3_local_patch_size=2, s1_global_k=4, s2_global_k=2, s3_global_k=2, s4_global_k=2)  # fmt: skip
of("vit-pytorch", "vit_pytorch.cct:CCT", PICTURES, img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=2,
   num_heads=4, mlp_ratio=2.0, num_classes=10, stochastic_depth=0.0, dropout_rate=0.0, attention_dropout=0.0)  # fmt: skip
of(
    "mlp-mixer-pytorch",
    "mlp_mixer_pytorch:MLPMixer",
    PICTURES,
    image_size=32,
    channels=3,
    patch_size=8,
    dim=32,
    depth=2,
    num_classes=10,
)
of("g-mlp-pytorch", "g_mlp_pytorch:gMLP", words(8), num_tokens=64, dim=32, depth=2, seq_len=8)
of("linformer", "linformer:Linformer", TOKENS, dim=32, seq_len=8, depth=2, heads=4, k=4)
of("reformer-pytorch", "reformer_pytorch:ReformerLM", words(16), num_tokens=64, dim=32, depth=2, max_seq_len=16,
   heads=4, bucket_size=4, n_hashes=2, causal=True)  # fmt: skip
of("local-attention", "local_attention:LocalTransformer", words(16), num_tokens=64, dim=32, depth=2, max_seq_len=16,
   heads=4, dim_head=8, local_attn_window_size=4)  # fmt: skip
of(
    "performer-pytorch",
    "performer_pytorch:PerformerLM",
    words(8),
    num_tokens=64,
    max_seq_len=8,
    dim=32,
    depth=2,
    heads=4,
    dim_head=8,
    causal=False,
)
of(
    "nystrom-attention",
    "nystrom_attention:Nystromformer",
    TOKENS,
    dim=32,
    depth=2,
    heads=4,
    dim_head=8,
    num_landmarks=4,
)
of("perceiver-pytorch", "perceiver_pytorch:PerceiverIO", lambda b: {"data": torch.randn(b, 8, 16), "queries": torch.randn(5, 32)},
   dim=16, queries_dim=32, logits_dim=10, depth=2, num_latents=6, latent_dim=32, cross_dim_head=8, latent_dim_head=8, latent_heads=4)  # fmt: skip
of("soft-moe-pytorch", "soft_moe_pytorch:SoftMoE", TOKENS, dim=32, seq_len=8, num_experts=4)
of("st-moe-pytorch", "st_moe_pytorch:MoE", TOKENS, dim=32, num_experts=4, batches=(4, 6))
of("colt5-attention", "colt5_attention:ConditionalRoutedFeedForward", TOKENS, 32, num_heavy_tokens=3)
of("mixture-of-experts", "mixture_of_experts:MoE", TOKENS, dim=32, num_experts=4)
of(
    "MEGABYTE-pytorch",
    "MEGABYTE_pytorch:MEGABYTE",
    words(16),
    num_tokens=64,
    dim=(32, 16),
    max_seq_len=(4, 4),
    depth=(1, 1),
    heads=4,
    dim_head=8,
    flash_attn=False,
)
of("block-recurrent-transformer-pytorch", "block_recurrent_transformer_pytorch:BlockRecurrentTransformer", words(16),
   num_tokens=64, dim=32, depth=2, dim_head=8, heads=4, max_seq_len=16, block_width=8, num_state_vectors=8, recurrent_layers=(2,))  # fmt: skip
of("compressive-transformer-pytorch", "compressive_transformer_pytorch:CompressiveTransformer", words(8), num_tokens=64,
   emb_dim=32, dim=32, depth=2, seq_len=8, mem_len=8, cmem_len=2, heads=4)  # fmt: skip
of("memorizing-transformers-pytorch", "memorizing_transformers_pytorch:KNNAttention", TOKENS, dim=32)
of(
    "routing-transformer",
    "routing_transformer:RoutingTransformer",
    TOKENS,
    dim=32,
    depth=2,
    max_seq_len=8,
    heads=4,
    window_size=4,
)
of("sinkhorn-transformer", "sinkhorn_transformer:SinkhornTransformer", TOKENS, dim=32, depth=2, heads=4, bucket_size=4)
of(
    "simple-hierarchical-transformer",
    "simple_hierarchical_transformer:HierarchicalTransformer",
    words(16),
    num_tokens=64,
    dim=32,
    depth=1,
    seq_len=16,
    hierarchies=(1, 2),
    window_sizes=(8, None),
    heads=4,
    dim_head=8,
    use_flash_attn=False,
)
of(
    "timesformer-pytorch",
    "timesformer_pytorch:TimeSformer",
    numbers(2, 3, 16, 16),
    dim=32,
    image_size=16,
    patch_size=8,
    num_frames=2,
    num_classes=5,
    depth=2,
    heads=4,
    dim_head=8,
)
of(
    "bottleneck-transformer-pytorch",
    "bottleneck_transformer_pytorch:BottleStack",
    numbers(16, 8, 8),
    dim=16,
    fmap_size=8,
    dim_out=32,
    heads=4,
    dim_head=8,
    num_layers=2,
)
of("glom-pytorch", "glom_pytorch:Glom", PICTURES, dim=32, levels=3, image_size=32, patch_size=8)
of(
    "siren-pytorch",
    "siren_pytorch:SirenNet",
    numbers(2),
    dim_in=2,
    dim_hidden=32,
    dim_out=3,
    num_layers=3,
    w0_initial=30.0,
)
of("bitlinear-pytorch", "bitlinear_pytorch:BitLinear", numbers(8, 32), 32, 64)
of(
    "mogrifier",
    "mogrifier:Mogrifier",
    lambda b: (torch.randn(b, 5, 32), torch.randn(b, 5, 32)),
    dim=32,
    iters=5,
    factorize_k=8,
)
of(
    "iTransformer",
    "iTransformer:iTransformer",
    numbers(24, 6),
    num_variates=6,
    lookback_len=24,
    dim=32,
    depth=2,
    heads=4,
    dim_head=8,
    pred_length=(6,),
)
of(
    "vector-quantize-pytorch",
    "vector_quantize_pytorch:ResidualVQ",
    TOKENS,
    dim=32,
    codebook_size=16,
    num_quantizers=2,
    codebook_dim=8,
)
of("egnn-pytorch", "egnn_pytorch:EGNN", lambda b: (torch.randn(b, 6, 32), torch.randn(b, 6, 3)), dim=32)
of("titans-pytorch", "titans_pytorch:NeuralMemory", TOKENS, dim=32, chunk_size=4)
of("tab-transformer-pytorch", "tab_transformer_pytorch:TabTransformer", lambda b: (torch.randint(0, 4, (b, 3)), torch.randn(b, 5)),
   categories=(5, 6, 4), num_continuous=5, dim=32, dim_out=1, depth=2, heads=4)  # fmt: skip
of("x-clip", "x_clip:CLIP", lambda b: {"text": torch.randint(1, 64, (b, 8)), "image": torch.randn(b, 3, 32, 32), "return_loss": True},
   dim_text=32, dim_image=32, dim_latent=16, num_text_tokens=64, text_enc_depth=1, text_seq_len=8, text_heads=4,
   visual_enc_depth=1, visual_image_size=32, visual_patch_size=8, visual_heads=4, text_dim_head=8, visual_dim_head=8,
   visual_patch_dropout=0.0)  # fmt: skip
