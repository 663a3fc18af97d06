"""What traces and transforms a split model: each is refused by name, as it would take a part for the whole."""

import torch
from small_models import IDS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx


def differentiated(kind, model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda q: functional_call(model, q, (), {"input_ids": IDS, "labels": IDS})[0]  # noqa: E731
    return torch.func.grad(loss)(parameters)


def mapped(kind, model):
    return torch.func.vmap(lambda ids: model(input_ids=ids[None], labels=ids[None])[0])(IDS)


def traced(kind, model):
    return torch.jit.trace(model, (IDS,), check_trace=False)


def traced_in_a_function(kind, model):
    """As ONNX without dynamo does: the model is no module of what is traced."""
    return torch.jit.trace(lambda ids: model(input_ids=ids)[0], (IDS,), check_trace=False)


def scripted(kind, model):
    return torch.jit.script(torch.nn.Sequential(model))


def quantised(kind, model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def exported(kind, model):
    return torch.export.export(model, (IDS,))


def recorded(kind, model):
    return make_fx(lambda ids: model(input_ids=ids, labels=ids)[0])(IDS)


def without_values(kind, model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(input_ids=IDS, labels=IDS)
