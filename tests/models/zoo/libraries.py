"""Tiny models of libraries: language, speech, molecules, tables, flows and pictures."""

from __future__ import annotations

import torch
from torch import nn

from zoo.entry import entry, numbers, of
from zoo.entry import ids as words

TOKENS = numbers(8, 32)


@entry("x-transformers: Decoder", words(8), "x_transformers")
def decoder() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
    return TransformerWrapper(num_tokens=64, max_seq_len=8, attn_layers=layers)  # type: ignore[no-any-return]


@entry("x-transformers: Encoder with ALiBi and gates", words(8), "x_transformers")
def encoder() -> nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    options = {"alibi_pos_bias": True, "attn_gate_values": True, "sandwich_norm": True, "attn_kv_heads": 2}
    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=64, max_seq_len=8, attn_layers=layers)  # type: ignore[no-any-return]


@entry("whisper: Whisper", lambda b: (torch.randn(b, 8, 24), torch.randint(64, (b, 5))), "whisper")
def whisper() -> nn.Module:
    from whisper.model import ModelDimensions, Whisper

    return Whisper(ModelDimensions(8, 12, 32, 4, 2, 64, 8, 32, 4, 2))  # type: ignore[no-any-return]


@entry("open_clip: CLIP", lambda b: (torch.randn(b, 3, 32, 32), torch.randint(1, 64, (b, 8))), "open_clip", "timm")
def open_clip() -> nn.Module:
    from open_clip import CLIP

    pictures = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
    return CLIP(16, pictures, {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2})  # type: ignore[no-any-return]


@entry("mambapy: Mamba", TOKENS, "mambapy")
def mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=2, d_state=4))  # type: ignore[no-any-return]


@entry("fair-esm: ESM2", lambda b: (torch.randint(4, 24, (b, 9)),), "esm")
def protein() -> nn.Module:
    from esm import ESM2

    return ESM2(num_layers=2, embed_dim=32, attention_heads=4)  # type: ignore[no-any-return]


def molecule(b: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3 * b, 16), torch.randint(3 * b, (2, 8 * b))


for kind in ("GCN", "GAT", "GIN", "GraphSAGE"):
    of(
        "torch_geometric",
        f"torch_geometric.nn.models:{kind}",
        molecule,
        in_channels=16,
        hidden_channels=32,
        num_layers=2,
        out_channels=4,
    )
of(
    "segment_anything",
    "segment_anything.modeling:ImageEncoderViT",
    numbers(3, 64, 64),
    img_size=64,
    patch_size=8,
    embed_dim=32,
    depth=2,
    num_heads=4,
    out_chans=16,
    window_size=4,
    global_attn_indexes=(1,),
    use_rel_pos=True,
    batches=(2, 3),
)
of(
    "neuraloperator",
    "neuralop.models:FNO",
    numbers(1, 16, 16),
    n_modes=(4, 4),
    hidden_channels=16,
    in_channels=1,
    out_channels=1,
    n_layers=2,
)
of(
    "rtdl_revisiting_models",
    "rtdl_revisiting_models:FTTransformer",
    lambda b: (torch.randn(b, 5), torch.randint(3, (b, 2))),
    n_cont_features=5,
    cat_cardinalities=[3, 3],
    d_out=2,
    n_blocks=2,
    d_block=32,
    attention_n_heads=4,
    attention_dropout=0.0,
    ffn_d_hidden_multiplier=1.5,
    ffn_dropout=0.0,
    residual_dropout=0.0,
)
of("conformer", "conformer:ConformerBlock", TOKENS, dim=32, dim_head=8, heads=4)
of(
    "denoising_diffusion_pytorch",
    "denoising_diffusion_pytorch:Unet",
    lambda b: (torch.randn(b, 3, 16, 16), torch.arange(b)),
    dim=16,
    dim_mults=(1, 2),
    flash_attn=False,
    attn_heads=2,
    attn_dim_head=8,
    batches=(2, 3),
)
of(
    "speechbrain",
    "speechbrain.lobes.models.CRDNN:CRDNN",
    numbers(20, 16),
    input_size=16,
    cnn_blocks=1,
    cnn_channels=(8,),
    rnn_layers=1,
    rnn_neurons=16,
    dnn_blocks=1,
    dnn_neurons=32,
    dropout=0.0,
)
of(
    "speechbrain",
    "speechbrain.lobes.models.ECAPA_TDNN:ECAPA_TDNN",
    numbers(20, 16),
    input_size=16,
    lin_neurons=24,
    channels=[32, 32, 32, 32, 64],
    attention_channels=16,
    res2net_scale=4,
    se_channels=16,
)
of(
    "speechbrain",
    "speechbrain.lobes.models.transformer.TransformerASR:TransformerASR",
    lambda b: (torch.randn(b, 12, 16), torch.randint(1, 30, (b, 5))),
    tgt_vocab=30,
    input_size=16,
    d_model=32,
    nhead=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    d_ffn=64,
    dropout=0.0,
)
of("zuko", "zuko.nn:MaskedMLP", numbers(8), torch.ones(4, 8, dtype=torch.bool), hidden_features=(32, 32))
of("nflows", "nflows.transforms:MaskedAffineAutoregressiveTransform", numbers(8), features=8, hidden_features=32)
of("pytorch_tabnet", "pytorch_tabnet.tab_network:TabNetNoEmbeddings", numbers(8), 8, 2, n_d=16, n_a=16, n_steps=2)
of(
    "segmentation_models_pytorch",
    "segmentation_models_pytorch:Unet",
    numbers(3, 32, 32),
    "resnet18",
    encoder_weights=None,
    classes=2,
    batches=(2, 3),
)
of(
    "tabm",
    "tabm:TabM",
    lambda b: (torch.randn(b, 6),),
    n_num_features=6,
    d_out=2,
    n_blocks=2,
    d_block=32,
    dropout=0.0,
    k=4,
)
of("kan", "kan:KAN", numbers(4), width=[4, 5, 2], grid=3, k=3, auto_save=False, symbolic_enabled=False)
of(
    "encodec",
    "encodec.modules:SEANetEncoder",
    numbers(1, 640),
    channels=1,
    dimension=16,
    n_filters=4,
    ratios=[4, 4],
    lstm=1,
)
of(
    "enformer_pytorch",
    "enformer_pytorch.modeling_enformer:Attention",
    TOKENS,
    32,
    heads=4,
    dim_key=8,
    dim_value=8,
    num_rel_pos_features=12,
)
