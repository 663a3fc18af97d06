"""torch's own transformer layers and attention by `parallelize`: results, gradients, masks, bytes, what is left."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid, LayoutError

HIDDEN, HEADS, INNER = 16, 4, 24


def encoder(batch_first=True, norm_first=False, activation="gelu", dropout=0.0, layers=1):
    layer = nn.TransformerEncoderLayer(
        HIDDEN, HEADS, INNER, dropout, activation, batch_first=batch_first, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(HIDDEN), enable_nested_tensor=False)


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(HIDDEN, HEADS, INNER, 0.0, batch_first=True), 2)


def both(make, mesh, scheme, **options):
    """The same model twice, the second one on the grid, with values that tell biases from zeros."""
    torch.manual_seed(0)
    dense = make().double()
    for parameter in dense.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return dense, ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme, **options)


def randn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(dense, model, args, kwargs, where, pick=lambda y: y):
    """Results and all gradients, those of the inputs too."""
    outs, inputs = [], []
    for each in (dense, model):
        given = [x.clone().requires_grad_() for x in args]
        y = pick(
            each(*(given * 3 if type(each).__name__ == "MultiheadAttention" and len(given) == 1 else given), **kwargs)
        )
        (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        outs.append(y)
        inputs.append(given)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-8, atol=1e-9, msg=f"{where}: y")
    assert type(outs[1]) is torch.Tensor
    for mine, theirs in zip(inputs[1], inputs[0], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-9, msg=f"{where}: dx")
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-7, atol=1e-9, msg=f"{where}: {name}")
    dense.zero_grad(), model.zero_grad()


def check_encoder(sizes, scheme, is_full):
    mesh = mesh_of(Grid(sizes))
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for options in ({}, {"batch_first": False, "norm_first": True, "activation": "relu"})[: 1 + is_full]:
        dense, model = both(lambda options=options: encoder(**options), mesh, scheme)
        x = randn(3, 5, HIDDEN) if options == {} else randn(5, 3, HIDDEN)  # three sequences, which nothing divides
        masks = {"mask": causal, "is_causal": True}, {"src_key_padding_mask": padding, "mask": causal.isinf()}
        for kwargs in ({}, *masks)[: 1 + 2 * is_full]:
            compare(dense, model, [x], kwargs, f"{mesh.grid}, {options}, {list(kwargs)}")
        assert not model.ndtp_report.kept and not model.ndtp_report.gathered, model.ndtp_report
        assert list(model.state_dict()) == list(dense.state_dict())
        dense.eval(), model.eval()
        with torch.no_grad():  # where torch has a fast path that reads weights
            torch.testing.assert_close(model(x), dense(x), rtol=1e-8, atol=1e-9)
            if is_full:
                padded = model(x, src_key_padding_mask=padding)
                kept = ~padding if options == {} else ~padding.T
                torch.testing.assert_close(padded[kept], dense(x, src_key_padding_mask=padding)[kept])
    x = randn(4, 5, HIDDEN).requires_grad_()
    model.train()
    x = x if options == {} else x.transpose(0, 1).detach().requires_grad_()
    with CommMeter() as meter:
        model(x).sum().backward()
    assert meter.volume == model.ndtp_report.volume(4, 5), f"{mesh.grid}: {meter.volume}"


def check_decoder_and_attention():
    mesh = mesh_of(Grid(x=2, y=2))
    dense, model = both(decoder, mesh, "2d")
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    kwargs = {"tgt_mask": causal, "memory_key_padding_mask": padding}
    compare(dense, model, [randn(2, 5, HIDDEN), randn(2, 7, HIDDEN, seed=2)], kwargs, "decoder")
    # Alone, with weights, masks for every head, and a single sequence.
    dense, model = both(lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True), mesh, "2d")
    by_head = randn(2 * HEADS, 5, 7, seed=4)
    given = [randn(2, 5, HIDDEN), randn(2, 7, HIDDEN, seed=2), randn(2, 7, HIDDEN, seed=3)]
    for averages in (True, False):
        for i in (0, 1):
            kwargs = {"attn_mask": by_head, "average_attn_weights": averages}
            compare(dense, model, given, kwargs, f"attention, {averages}, {i}", lambda y, i=i: y[i])
    single = [x[0] for x in given]
    compare(dense, model, single, {"need_weights": False}, "a single sequence", lambda y: y[0])
    compare(dense, model, given[:1], {"attn_mask": causal, "is_causal": True}, "self-attention", lambda y: y[0])


def check_in_a_model():
    """Between layers of a user's own, with a pair besides; what does not fit stays whole, with the reason."""
    mesh = mesh_of(Grid(x=2, y=2))

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.encoder = nn.Linear(3, HIDDEN), encoder(layers=2)
            self.odd = nn.MultiheadAttention(HIDDEN, 1, batch_first=True)
            self.head = nn.Sequential(nn.Linear(HIDDEN, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, x):
            h = self.encoder(torch.sin(self.embed(x)))
            return self.head(h + self.odd(h, h, h)[0]).mean(1)

    dense, model = both(Mine, mesh, "2d")
    compare(dense, model, [randn(4, 5, 3)], {}, "a model")
    report = model.ndtp_report
    assert report.kept["odd"] == "1 heads, which 2 parts of features do not divide", report
    assert {"encoder.layers.0.self_attn.in_proj", "encoder.layers.1.linear2", "head.0"} <= set(report.replaced)
    assert "embed" in report.kept and not any("encoder" in name for name in report.kept)
    with pytest.raises(LayoutError, match=r"volume\(batch, sequence\)"):
        report.volume(20)
    with pytest.raises(LayoutError, match="nested tensor"):
        model.encoder(torch.nested.nested_tensor([randn(2, HIDDEN)]))
    kept = ndtp.parallelize(encoder().double(), mesh, scheme="2d", keep=["layers.0.self_attn"])
    assert kept.ndtp_report.kept == {"layers.0.self_attn": "by the plan"}, kept.ndtp_report


def dropped(sizes, scheme):
    """Dropout of weights has one mask for all grids; three sequences are padded."""
    mesh = mesh_of(Grid(sizes))
    _, model = both(lambda: encoder(dropout=0.5), mesh, scheme)
    torch.manual_seed(5)
    return model(randn(3, 5, HIDDEN)).detach()


def test_encoder(ranks):
    check_encoder({"x": 1}, "1d", True)
    plane, other = {"x": 2, "y": 2}, {"z": 2, "y": 2}
    for sizes, scheme, is_full in by_turns(
        [(plane, "2d", True), (other, "3d", False), (plane, "2d-features", False)], 3
    ):
        ranks(4).run(check_encoder, sizes, scheme, is_full)


def test_decoder_attention_and_models(ranks):
    ranks(4).run(check_decoder_and_attention)
    ranks(4).run(check_in_a_model)


def test_dropout_has_one_mask(ranks):
    expected = dropped({"x": 1}, "1d")
    for found in ranks(4).run(dropped, {"x": 2, "y": 2}, "2d"):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
