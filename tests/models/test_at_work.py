"""Methods beside forward that compute with a model's parameters, told by what calls them."""

from torch import nn

from ndtp.models.at_work import computing


class Model(nn.Module):
    def forward(self, x):
        return self.head(self.features(self.first(x))) if x is not None else self.inner.forward(x)

    @staticmethod
    def first(x):
        return x[:1]

    def features(self, x):
        return self.again(x) * self.scale

    def again(self, x):
        return self.forward(x[1:])

    def tie(self):
        self.head = self.scale


def test_what_forward_calls_computes_and_nothing_else_does():
    """Methods that call each other; `head`, `scale` and a static method, which has no parameters, are none."""
    assert computing(Model) == {"features", "again"}
