"""The texts of lines, by kind.  Texts that do not fit a value raise there, and others are drawn.

`{x}` is a value, `{y}` one that broadcasts to it, `{z}` one that it can be multiplied with, `{dim}` a dim, `{keep}` an
argument that may be there; `<nn.Linear(..)>` is a layer.  See `lines.Draw.words`.
"""

VALUES = {
    "unary": """
F.gelu({x}) | torch.tanh({x}) | {x}.sigmoid() | F.relu({x}) | F.silu({x}) | {x}.abs() | {x}.tanh().exp() | 1 - {x}
{x} / 3 | -{x} | {x}.clamp(-0.7, 0.9) | {x}.clamp(min=0.1) | F.softplus({x}) | {x}.square() | F.leaky_relu({x}, 0.1)
{x}.sin() | ({x}.abs() + 0.1).sqrt() | ({x}.abs() + 1).log() | {x}.float().double() | {x}.contiguous() | {x}.clone()
torch.erf({x}) | 2 ** {x}.tanh() | {x} ** 2 | F.elu({x}) | {x}.detach() * 2 | torch.nan_to_num({x}) | F.hardtanh({x})
{x}.to(torch.float64) | {x}.type_as({x}) | torch.ones_like({x}) * 0.5 | {x}.new_ones({x}.shape) - {x}
torch.zeros_like({x}) | {x}.masked_fill({x} > 0.321, 0.2) | F.dropout({x}, 0.0) | torch.where({x} > 0.123, {x}, 0.5)
{x}.logical_not().double() | ({x} > 0.123) | ({x} > 0.123).double() | torch.full_like({x}, 0.3) + {x}
torch.clamp({x}, max=fixed(1)[0]) | F.logsigmoid({x}) | F.mish({x}) | torch.rsub({x}, 1.5) | {x}.new_zeros(3)
{x}.data * 1.0 | torch.positive({x}) | F.prelu({x}, fixed(1)) | F.threshold({x}, 0.1, 0.2) | {x}.reciprocal().tanh()
{x}.to({x}.dtype) | torch.atleast_2d({x}) | F.hardswish({x}) | F.softsign({x}) | {x}.sign() | {x}.floor()
""",
    "binary": """
{x} + {y} | {x} * {y} | {x} - {y} | {y} - {x} | {y} * {x} | torch.maximum({x}, {y}) | torch.minimum({y}, {x})
{x} / ({y}.abs() + 1) | torch.lerp({x}, {y}, 0.3) | torch.where({x} > 0.123, {x}, {y}) | torch.add({y}, {x}, alpha=2)
torch.addcmul({x}, {x}, {y}, value=0.5) | torch.atan2({x}, {y}.abs() + 1) | torch.mul({x}, other={y})
torch.sub({x}, {y}) | torch.hypot({x}, {y}.abs() + 1) | torch.max({x}, {y}) | {x}.mul({y}.tanh())
({x} > {y} + 0.01).double() * {x} | torch.clamp({x}, min={y}.tanh() - 2) | torch.lerp({x}, {y}, {x}.sigmoid())
({x} + {y}).tanh() | {y} @ {x} / {n} | torch.stack(torch.broadcast_tensors({x}, {y}))
torch.where({y} > 0.123, {y}, {x}) | torch.logaddexp({x}, {y})
""",
    "reshape": """
{x}.view({form}) | {x}.reshape({form}) | torch.reshape({x}, ({form},)) | {x}.view({free}) | {x}.reshape({free})
{x}.unflatten({dim}, {split}) | {x}.unflatten(-1, {split}) | {x}.unflatten({dim}, {split}).transpose({dim}, -1)
{x}.flatten({a}, {b}) | torch.flatten({x}, {a}) | {x}.flatten() | {x}.flatten(-2) | {x}.reshape(-1, {n})
{x}.view({x}.shape) | {x}.ravel() | {x}.reshape({form}).reshape({x}.shape)
""",
    "turned": """
{x}.transpose({a}, {b}) | {x}.permute({order}) | {x}.mT | {x}.movedim({a}, {b}) | {x}.flip({a})
{x}.swapaxes({a}, {b}) | torch.permute({x}, {order}) | {x}.roll(1, {a}) | {x}.roll(-2, {dim})
torch.roll({x}, (1, 2), ({a}, {b})) | torch.rot90({x}, 1, [{a}, {b}]) | {x}.transpose({a}, {b}).contiguous()
{x}.tril() | torch.triu({x}, 1) | {x}.mT.contiguous().mT | {x}.diagonal(dim1={a}, dim2={b}) | torch.diag_embed({x})
{x}.unsqueeze({new}) | {x}.squeeze() | {x}[None] | {x}[..., None] | {x}.unsqueeze({new}).squeeze({new})
{x}.squeeze({dim})
""",
    "expand": """
{x}.unsqueeze({new}).expand({expanded}) | {x}.expand(2, *{x}.shape) | {x}.repeat({times})
torch.tile({x}, ({times},)) | {x}[None].expand_as({x}[None]) | {x}.repeat_interleave(2, {dim})
torch.broadcast_to({x}, (2, *{x}.shape)) | {x}[:1].expand({x}.shape) | {x}.sum({dim}, keepdim=True).expand_as({x})
{x}.repeat_interleave(2)
""",
    "parts": """
{x}.chunk({count}, {dim})[0] | {x}.chunk({count}, {dim})[-1] | {x}.split({k}, {dim})[-1] | {x}.narrow({dim}, 0, {k})
{x}.split({parts}, {dim})[{part}] | {x}.select({dim}, {at}) | {x}.unbind({dim})[{at}] | {x}.unfold({dim}, 2, 1)
torch.tensor_split({x}, {count}, {dim})[0] | torch.stack({x}.unbind({dim}), {dim}) | {x}.unfold({dim}, 2, 2)
torch.cat({x}.chunk({count}, {dim})[::-1], {dim}) | sum({x}.unbind({dim})) | {x}.chunk(2, -1)[0] * {x}.chunk(2, -1)[1]
torch.cat([-{x}.chunk(2, -1)[1], {x}.chunk(2, -1)[0]], -1)
torch.cat([p * 2 for p in {x}.split({parts}, {dim})], {dim})
""",
    "indexed": """
{x}[{key}] | {x}[{key}] | {x}[{key}] | {x}.index_select({dim}, torch.tensor({few})) | {x}[{x} > 0.123]
torch.gather({x}, {dim}, {index}) | torch.take_along_dim({x}, {index}, {dim}) | torch.masked_select({x}, {x} > 0.2)
{x}.index_fill({dim}, torch.tensor({one}), 0.5) | {x}.take(torch.tensor([0, 1])) | {x}.scatter({dim}, {index}, 0.5)
{x}.index_add({dim}, torch.tensor({one}), {x}.narrow({dim}, 0, 1))
{x}.select_scatter({x}.select({dim}, 0) * 2, {dim}, -1)
{x}.index_copy({dim}, torch.tensor({one}), {x}.narrow({dim}, 0, 1) * 2) | F.pad({x}, (1, 2))
F.pad({x}, (0, 0, 1, 0)) | {x}.scatter_add({dim}, {index}, {x}.narrow({dim}, 0, 1).expand_as({index}))
F.embedding(torch.tensor([1, 0, 1]), {x}) | torch.nonzero({x} > 0.123) | torch.where({x} > 0.123)[0]
F.pad({x}, (0, 1), value=0.5) | {x}[torch.tensor([[0, -1]])]
""",
    "joined": """
torch.cat([{x}, {x} * 2], {dim}) | torch.cat([{y}, {x}], {dim}) | torch.stack([{x}, {x} + 1], {new})
torch.hstack([{x}, {x}]) | torch.vstack([{x}, {y}]) | torch.cat((fixed({ones}), {x}), dim={dim})
torch.cat([{x}, fixed({whole})], {dim}) | torch.stack(({x}, fixed({whole}))) | torch.stack([{x}, {y}], -1)
torch.cat([{x}, {x}.narrow({dim}, 0, {k})], {dim})
""",
    "along": """
{x}.sum({dim}{keep}) | {x}.mean({dim}{keep}) | {x}.var({dim}{keep}) | {x}.amax({dim}{keep})
{x}.max({dim}{keep}).values | {x}.min({dim}{keep})[0] | {x}.prod({dim}{keep}) | torch.logsumexp({x}, {dim}{keep})
({x}.norm(dim={dim}{keep}) + 0.1) | {x}.cumsum({dim}) | {x}.cumprod({dim}) | F.softmax({x}, dim={dim})
{x}.log_softmax({dim}) | F.softmin({x}, {dim}) | ({x} > 0.123).any({dim}{keep}) | ({x} > 0.123).all({dim}{keep})
{x}.argmax({dim}{keep}) | {x}.topk(1, {dim})[0] | {x}.sort({dim}).values | {x}.median({dim}{keep}).values
F.normalize({x} + 2, dim={dim}) | F.normalize({x} + 2, 1, {dim}) | torch.std({x}, {dim}, unbiased=False{keep})
torch.linalg.vector_norm({x} + 2, 1, {dim}{keep}) | ({x} > 0.123).sum({dim}{keep})
torch.count_nonzero({x} > 0.123, {dim}) | torch.aminmax({x}, dim={dim}{keep})[1] | {x}.diff(dim={dim})
{x}.argsort({dim}) | torch.var_mean({x}, {dim}, correction=0{keep})[0] | {x}.logcumsumexp({dim}) | F.glu({x}, {dim})
{x}.nanmean({dim}{keep}) | {x}.kthvalue(1, {dim}{keep})[0] | F.cosine_similarity({x} + 2, {x}.square() + 1, dim={dim})
{x}.cummax({dim}).values | {x} / {x}.abs().sum({dim}, keepdim=True).add(1) | F.layer_norm({x}, {x}.shape[-1:])
F.rms_norm({x}, {x}.shape[-1:], eps=1e-3) | {x} * torch.rsqrt({x}.pow(2).mean({dim}, keepdim=True) + 0.1)
F.one_hot({x}.argmax({dim}), {size}).double() | torch.trapz({x}, dim={dim}) | {x}.topk(2, {dim}, largest=False).values
{x}.unique_consecutive() | torch.linalg.norm({x} + 2)
""",
    "reduced": """
{x}.sum(({a}, {b})) | {x}.mean([{a}, {b}], keepdim=True) | {x}.sum() | {x}.mean() | {x}.max() | {x}.std()
{x}.amin(({a}, {b})) | torch.logsumexp({x}, ({a}, {b})) | ({x} + 2).norm() | {x}.var(({a}, {b}), correction=0)
F.layer_norm({x}, {x}.shape[-2:]) | {x}.argmax() | {x}.median() | ({x} > 0.123).any() | {x}.sum(dtype=torch.float64)
F.mse_loss({x}, fixed({whole})) | F.l1_loss({x}, fixed({whole}), reduction='sum') | {x}.trace()
F.smooth_l1_loss({x}, {y}) | F.mse_loss({y}, {x})
F.cross_entropy({x}.flatten(0, -2), torch.arange({x}.numel() // {n}) % {n})
F.nll_loss({x}.log_softmax(-1), torch.arange(len({x})) % {n})
F.binary_cross_entropy_with_logits({x}, fixed({whole}).sigmoid())
F.huber_loss({x}, fixed({whole}), reduction='none')
F.kl_div({x}.log_softmax(-1), fixed({whole}).softmax(-1), reduction='batchmean')
F.cross_entropy({x}, fixed({whole}).softmax(-1))
F.cross_entropy({x}.transpose(1, -1), torch.zeros({x}.shape[:-1], dtype=torch.long))
F.gaussian_nll_loss({x}, {x} + 1, {x} ** 2 + 1)
""",
    "asked": """
{x} * float({x}.detach().mean()) | {x} * 2 if {x}.sum() > 0.1 else {x} * 3 | {x} * {x}.max().item()
{x} / {x}.shape[-1] | {x} + len({x}) | {x} * torch.tensor({x}.detach().flatten()[:1].tolist()).double()
{x} * {x}.size(0) | {x} + torch.arange({n}) | sum(row * i for i, row in enumerate({x})) | torch.equal({x}, {x}) * {x}
{x}.detach().requires_grad_(False) + {x} | {x} * (1 if torch.is_tensor({x}) else 2)
{x} + {x}.new_full({x}.shape[-1:], 0.25) | torch.allclose({x}, {x} + 1) + {x} | {x} * {x}.stride(-1)
{x} * (2 if {x}.is_contiguous() else 3) | {x}.view({x}.size()) | {x} * {x}.dim() | {x} * {x}.numel()
""",
    "product": """
{x} @ {z} / {n} | torch.matmul({x}, {z}) / {n} | {x} @ fixed({n}, 3) / {n}
F.linear({x}, fixed(8, {n}), fixed(8)) / {n} | torch.addmm(fixed(4), {x}, fixed({n}, 4)) / {n}
torch.tensordot({x}, fixed({n}, 2), 1) / {n} | torch.outer({x}, {x}) | ({x} @ {x}.mT / {n}).softmax(-1) @ {x}
torch.cdist({x}, {x} + 1) | torch.inner({x}, fixed({n})) / {n} | torch.dot({x}.flatten(), {x}.flatten()) / {x}.numel()
{x}.mT @ {x} / {rows} | torch.bmm({x}, {x}.mT) / {n} | torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT, alpha=0.1) / 4
{x} @ {x}.transpose(-1, -2) / 4
""",
    "einsum": """
torch.einsum('{letters},{letters}->{kept}', {x}, {x}) / {n}
torch.einsum('{letters},{first}z->{first}', {x}, {x}) / {n} | torch.einsum('...d,kd->...k', {x}, fixed(3, {n})) / {n}
torch.einsum('{letters},{last}->{first}', {x}, fixed({n})) / {n}
torch.einsum('{letters},{last}k,k->{first}', {x}, fixed({n}, 2), fixed(2)) / {n}
torch.einsum('...nd,...md->...nm', {x}, {x}) / {n} | torch.einsum('{letters}->{kept}', {x}) / {n}
torch.einsum('{first}y,{first}z->{first}yz', {x}, {x}) / {n}
""",
    "attention": """
F.scaled_dot_product_attention({x}, {x} * 2, {x}) | F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)
F.scaled_dot_product_attention({x}, {x}, {y}, attn_mask=fixed({rows}, {rows}))
F.scaled_dot_product_attention({x}, {y}, {y}) | F.scaled_dot_product_attention({x}[:1], {y}, {y})
F.scaled_dot_product_attention({x}, {x}[..., :1, :, :], {x}[..., :1, :, :], enable_gqa=True)
F.scaled_dot_product_attention({x}, {x}, {x}, attn_mask=(fixed({rows}, {rows}) > -2).tril(), scale=0.5)
""",
    "features": """
<nn.Linear({n}, 12, bias={bias})>({x}) | <nn.Linear({n}, 24)>({x}) | <nn.Linear({n}, 16, bias={bias})>({x})
F.linear({x}, <nn.Linear({n}, 12)>.weight)
""",
    "apart": """
torch.mul(*{x}.chunk(2, -1)) | F.glu({x}, -1) | {x}.chunk(2, -1)[1] | {x}.chunk(3, -1)[1] | {x}.chunk(4, -1)[2]
torch.add(*{x}.split({n} // 2, -1)) | {x}.split([{n} - 4, 4], -1)[1] | {x}.unflatten(-1, (2, -1)).unbind(-2)[1]
{x}.unflatten(-1, (-1, 2)).mean(-1) | {x}[..., {k}:] | {x}[..., ::2] * {x}[..., 1::2]
{x}.unflatten(-1, (2, -1)).softmax(-2)
{x}.unflatten(-1, (3, -1))[..., 1, :]
{x}.view(*{x}.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
sum({x}.tensor_split(2, -1)) | {x}.narrow(-1, {n} // 2, {n} // 2)
torch.stack({x}.chunk(2, -1)).amax(0)
""",
    "layers": """
<nn.Linear({n}, {out}, bias={bias})>({x}) | <nn.Linear({n}, {out})>({x}) | <nn.LayerNorm({n})>({x})
<nn.RMSNorm({n}, 1e-3)>({x}) | {x} + <nn.Linear({wide}, {n})>(F.gelu(<nn.Linear({n}, {wide})>({x})))
<nn.Linear({n}, {wide}, bias={bias})>({x}.relu())
<nn.Linear({wide}, {n})>(F.silu(<nn.Linear({n}, {wide}, bias=False)>({x})) * <nn.Linear({n}, {wide})>({x}))
{x} + <nn.Linear({wide}, {n})>(F.relu(<nn.Linear({n}, {wide})>({x}), inplace=True)) | <nn.Embedding(8, {out})>(ids)
<nn.Conv1d({channels}, 4, 1)>({x}) | <nn.GroupNorm(1, {channels})>({x})
<nn.Conv1d({channels}, 3, 3, padding=1)>({x}) | <nn.MultiheadAttention({n}, 2, batch_first=True)>({x}, {x}, {x})[0]
<nn.GRU({n}, 4, batch_first=True)>({x})[0] | <nn.AvgPool1d(2)>({x}) | <nn.PReLU({channels})>({x})
<nn.Bilinear({n}, {n}, 3)>({x}, {x}) | <nn.LSTM({n}, 4)>({x})[0] | <nn.Linear({n}, {n})>({x}) + {x}
F.linear({x}, <nn.Linear({n}, {out})>.weight) | {x} * <nn.Linear(1, {n})>.weight.sum(-1)
<nn.Linear({rows}, {out})>({x}.mT).mT
""",
}

WRITES = {
    "in_place": """
{x}.add_(1) | {x}.mul_(0.5) | {x}.add_({y}) | {x} += {y} | {x}.zero_() | {x}.clamp_(-1, 1) | {x}.copy_({y})
{x}.relu_() | {x}.fill_(0.3) | {x}.masked_fill_({x} > 0.321, 0.1) | F.relu({x}, inplace=True) | {x}.mul_(2).sub_(0.1)
{x} *= 2 | {x}.neg_() | {x}.tanh_() | torch.sigmoid_({x}) | {x}.lerp_({y}, 0.5) | {x}.div_(2)
{x}.add_({y}, alpha=0.5) | {x}.detach().mul_(1) | F.silu({x}, True) | {x}.data.mul_(1)
{x}.addcmul_({x}, {y}, value=0.1) | {x}.squeeze_() | {x}.unsqueeze_(0) | {x}.transpose_({a}, {b})
{x} = {x}.transpose({a}, {b}) | {x} = {x}[:, :1] | {x}.exp_().log_() | torch.add({x}, {y}, out={x})
F.dropout({x}, 0.0, inplace=True) | torch.relu_(input={x}) | nn.init.constant_({x}, 0.3) | F.elu({x}, 1.0, True)
torch.cumsum({x}.detach(), {dim}, out={x}.detach()) | torch._foreach_mul_([{x}], 0.5)
""",
    "places": """
{x}[{key}] = 0.25 | {x}[{key}] = {x}[{key}] * 2 | {x}[{key}] *= 0.5 | {x}[{key}] += 1 | {x}[{x} > 0.4] = 0.2
{x}[{key}] = fixed(1)[0] | {x}.index_add_({dim}, torch.tensor([0]), {x}.narrow({dim}, 0, 1).clone())
{x}.index_fill_({dim}, torch.tensor([0]), 0.3)
{x}.index_copy_({dim}, torch.tensor([0]), {x}.narrow({dim}, 0, 1).clone() * 2) | {x}.scatter_({dim}, {index}, 0.5)
""",
    "through_views": """
{x}.transpose(0, -1).add_(0.5) | {x}.select({dim}, 0).zero_() | {x}.narrow({dim}, 0, {k}).mul_(2)
{x}.view({form}).mul_(0.5) | {x}.chunk(2, {dim})[0].add_(1) | {x}.unbind({dim})[-1].fill_(0.5) | {x}.view(-1)[0] = 0.5
{x}.flatten()[:2] = 0.5 | {x}.unsqueeze(0).mul_(2) | {x}.mT[..., 0] = 0.1 | {x}.view({form})[0] += 1
{x}.reshape({form}).add_(0.5) | {x}.contiguous().mul_(0.5) | {x}.mT.reshape({form}).mul_(2)
{x}.mT.contiguous().zero_() | {x}.diagonal(dim1={a}, dim2={b}).fill_(0.5) | {x}.split({parts}, {dim})[{part}].mul_(3)
""",
}

OVERLAPPING = {"{x}.unfold({dim}, 2, 1)"}

TEXTS = {
    kind: [text.strip() for part in texts.strip().splitlines() for text in part.split(" | ")]
    for kind, texts in (VALUES | WRITES).items()
}
