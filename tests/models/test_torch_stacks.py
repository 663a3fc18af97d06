"""torch's own transformer layers and attention by `parallelize`: results, gradients, masks, bytes, what is left."""

import copy

import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid

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


def whole(y):
    return y.gathered() if hasattr(y, "gathered") else y


def compare(dense, model, args, kwargs, where, pick=lambda y: y):
    """Results and all gradients, those of the inputs too."""
    outs, inputs = [], []
    for each in (dense, model):
        given = [x.clone().requires_grad_() for x in args]
        y = pick(
            each(*(given * 3 if type(each).__name__ == "MultiheadAttention" and len(given) == 1 else given), **kwargs)
        )
        y = whole(y)
        (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        outs.append(y)
        inputs.append(given)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-8, atol=1e-9, msg=f"{where}: y")
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
        report = model.ndtp_report
        assert not report.gathered and not [name for name in report.kept if "norm" not in name], report
        assert {"layers.0.self_attn.in_proj", "layers.0.linear1"} <= set(report.replaced), report
        assert list(model.state_dict()) == list(dense.state_dict())
        dense.eval(), model.eval()
        with torch.no_grad():  # where torch has a fast path that reads weights
            torch.testing.assert_close(whole(model(x)), dense(x), rtol=1e-8, atol=1e-9)
            if is_full:
                padded = whole(model(x, src_key_padding_mask=padding))
                kept = ~padding if options == {} else ~padding.T
                torch.testing.assert_close(padded[kept], dense(x, src_key_padding_mask=padding)[kept])
    model.train()
    x = randn(4, 5, HIDDEN) if options == {} else randn(5, 4, HIDDEN)
    with CommMeter() as forward:
        y = model(x)
    loss = y.sum()
    with CommMeter() as backward:
        loss.backward()
    assert forward.volume + backward.volume == model.ndtp_report.volume(src=x), f"{mesh.grid}, {options}"


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


class Around(nn.Module):
    """An attention between layers, which is called with the tensors that `inputs` says."""

    def __init__(self, inputs="hhh", heads=HEADS, size=HIDDEN, **options):
        super().__init__()
        self.inputs, self.options = inputs, options
        self.first, self.second = nn.Linear(HIDDEN, size), nn.Linear(HIDDEN, options.get("kdim") or size)
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True, **options)
        self.last = nn.Linear(size, HIDDEN)

    def forward(self, x, memory):
        h = self.first(x)
        given = {"h": h, "p": h + 0.1, "m": self.second(memory)}
        q, k, v = (given[each] for each in self.inputs)
        if "function" in vars(self):
            a, turned = self.attention, [each.transpose(0, 1) for each in (q, k, v)]
            y, _ = F.multi_head_attention_forward(
                *turned, a.embed_dim, a.num_heads, a.in_proj_weight, a.in_proj_bias, a.bias_k, a.bias_v,
                a.add_zero_attn, 0.0, a.out_proj.weight, a.out_proj.bias, need_weights=False,
            )  # fmt: skip
            return self.last(y.transpose(0, 1))
        return self.last(self.attention(q, k, v, need_weights="m" in self.inputs)[0])


OPTIONS = {
    "memory": ({"inputs": "hmm"}, ["in_proj_q", "in_proj_kv"]),
    "places in queries and keys": ({"inputs": "pph"}, ["in_proj_qk", "in_proj_v"]),
    "one head, no bias": ({"heads": 1, "bias": False}, ["in_proj"]),
    "keys of other sizes": ({"inputs": "hmm", "kdim": 6, "vdim": 6}, ["in_proj_q", "in_proj_k", "in_proj_v"]),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, ["in_proj"]),
    "no parts of its features": ({"size": 18, "heads": 3}, []),
    "the function": ({"add_bias_kv": True}, None),
}


def check_options():
    mesh = mesh_of(Grid(x=2, y=2))
    for what, (options, products) in OPTIONS.items():
        dense, model = both(lambda options=options: Around(**options), mesh, "2d")
        if products is None:
            dense.function = model.function = True
        compare(dense, model, [randn(3, 5, HIDDEN), randn(3, 7, HIDDEN, seed=2)], {}, what)
        layers = [name for name in model.ndtp_report.replaced if not name.endswith("_weight")]  # those are stored split
        found = [name for name in layers if "attention.in_proj" in name or "v_proj" in name]
        assert products is None or [name.split(".")[1] for name in found] == products, model.ndtp_report
        assert products == [] or not model.ndtp_report.gathered, f"{what}: {model.ndtp_report}"
        is_kept = "ranks do not divide" in model.ndtp_report.kept.get("attention", "")
        assert is_kept == (products == []), f"{what}: {model.ndtp_report}"


def check_in_a_model():
    """Between layers of a user's own; an attention that is to stay whole stays whole."""
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
    assert report.kept == {}, report
    assert {"encoder.layers.0.self_attn.in_proj", "encoder.layers.1.linear2", "head.0", "embed", "odd.in_proj"} <= set(
        report.replaced
    )
    dense, kept = both(encoder, mesh, "2d", keep=["layers.0.self_attn"])
    compare(dense, kept, [randn(4, 5, HIDDEN)], {}, "kept")
    assert kept.ndtp_report.kept.keys() == {"layers.0.self_attn", "layers.0.self_attn.out_proj"}, kept.ndtp_report


def dropped(sizes, scheme):
    """Dropout of weights has one mask for all grids; three sequences are padded."""
    mesh = mesh_of(Grid(sizes))
    _, model = both(lambda: encoder(dropout=0.5), mesh, scheme)
    torch.manual_seed(5)
    return whole(model(randn(3, 5, HIDDEN))).detach()


def check_blind():
    """An empty sequence, whose rows see no key, beside dropout that drops nothing."""
    dense, model = both(lambda: encoder(dropout=1e-15), mesh_of(Grid(x=2)), "1d")
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0] = True
    additive = torch.zeros(5, 5, dtype=torch.float64)
    additive[2] = -torch.inf
    for kwargs in ({"src_key_padding_mask": padding}, {"mask": additive}):
        compare(dense, model, [randn(3, 5, HIDDEN)], kwargs, str(list(kwargs)))


def test_rows_that_see_no_key(ranks):
    ranks(2).run(check_blind)


def test_encoder(ranks):
    check_encoder({"x": 1}, "1d", True)
    plane, other = {"x": 2, "y": 2}, {"z": 2, "y": 2}
    for sizes, scheme, is_full in by_turns(
        [(plane, "2d", True), (other, "3d", False), (plane, "2d-features", False)], 3
    ):
        ranks(4).run(check_encoder, sizes, scheme, is_full)


def test_decoder_attention_and_models(ranks):
    ranks(4).run(check_decoder_and_attention)
    ranks(4).run(check_options)
    ranks(4).run(check_in_a_model)


def test_dropout_has_one_mask(ranks):
    expected = ranks(2).run(dropped, {"x": 2}, "1d-sp")[0]
    for found in ranks(4).run(dropped, {"x": 2, "y": 2}, "2d"):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
