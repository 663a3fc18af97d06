"""Tiny models of other packages, as their users make them; one whose package is not installed is left out."""

from __future__ import annotations

import torch

from zoo.entry import ids as words
from zoo.entry import numbers, of

PICTURES, TOKENS = numbers(3, 32, 32), numbers(8, 32)


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
of(
    "reformer-pytorch",
    "reformer_pytorch:ReformerLM",
    words(16),
    num_tokens=64,
    dim=32,
    depth=2,
    max_seq_len=16,
    heads=4,
    bucket_size=4,
    n_hashes=2,
    causal=True,
)
of(
    "local-attention",
    "local_attention:LocalTransformer",
    words(16),
    num_tokens=64,
    dim=32,
    depth=2,
    max_seq_len=16,
    heads=4,
    dim_head=8,
    local_attn_window_size=4,
)
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
of(
    "perceiver-pytorch",
    "perceiver_pytorch:PerceiverIO",
    lambda b: {"data": torch.randn(b, 8, 16), "queries": torch.randn(5, 32)},
    dim=16,
    queries_dim=32,
    logits_dim=10,
    depth=2,
    num_latents=6,
    latent_dim=32,
    cross_dim_head=8,
    latent_dim_head=8,
    latent_heads=4,
)
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
of(
    "block-recurrent-transformer-pytorch",
    "block_recurrent_transformer_pytorch:BlockRecurrentTransformer",
    words(16),
    num_tokens=64,
    dim=32,
    depth=2,
    dim_head=8,
    heads=4,
    max_seq_len=16,
    block_width=8,
    num_state_vectors=8,
    recurrent_layers=(2,),
)
of(
    "compressive-transformer-pytorch",
    "compressive_transformer_pytorch:CompressiveTransformer",
    words(8),
    num_tokens=64,
    emb_dim=32,
    dim=32,
    depth=2,
    seq_len=8,
    mem_len=8,
    cmem_len=2,
    heads=4,
)
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
of(
    "tab-transformer-pytorch",
    "tab_transformer_pytorch:TabTransformer",
    lambda b: (torch.randint(0, 4, (b, 3)), torch.randn(b, 5)),
    categories=(5, 6, 4),
    num_continuous=5,
    dim=32,
    dim_out=1,
    depth=2,
    heads=4,
)
of(
    "x-clip",
    "x_clip:CLIP",
    lambda b: {"text": torch.randint(1, 64, (b, 8)), "image": torch.randn(b, 3, 32, 32), "return_loss": True},
    dim_text=32,
    dim_image=32,
    dim_latent=16,
    num_text_tokens=64,
    text_enc_depth=1,
    text_seq_len=8,
    text_heads=4,
    visual_enc_depth=1,
    visual_image_size=32,
    visual_patch_size=8,
    visual_heads=4,
    text_dim_head=8,
    visual_dim_head=8,
    visual_patch_dropout=0.0,
)
