"""Attention whose keys have other padding than its queries: few key heads, padded, of which code makes many."""

from dataclasses import replace

import torch
import torch.nn.functional as F

import ndtp
from ndtp.split import Context, cut, enter, spec_of, whole


def many(x):
    """Repeat each head as people do who know no grouped attention."""
    return x[:, :, :, None].expand(-1, -1, -1, 2, -1).reshape(*x.shape[:2], -1, x.shape[3])


def check_repeated_heads():
    dense = [torch.randn(1, 12, n, 4, generator=torch.Generator().manual_seed(n)).double() for n in (6, 3, 3)]
    context = Context(ndtp.ProcessGrid(ndtp.Grid(x=2, y=2)))
    for way in ("ring", "heads", "gather", "auto"):
        for causal in (False, True):
            given = []
            for x in dense:
                spec = spec_of(replace(context, attention=way), tuple(x.shape), [(), ("x",), ("y",), ()])
                given.append(enter(cut(x.clone().requires_grad_(), spec), spec))
            found, expected = (
                F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, many(k), many(v))), is_causal=causal)
                for q, k, v in (given, dense)
            )
            torch.testing.assert_close(whole(found).detach(), expected, msg=lambda m, way=way: f"{way}: {m}")
    return True


def test_repeated_heads(ranks):
    assert all(ranks(4).run(check_repeated_heads))
