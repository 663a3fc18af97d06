"""Methods beside forward that compute with a model's parameters, told by what calls them."""

from torch import nn

from ndtp.models.at_work import computing


class Model(nn.Module):
    def forward(self, x):
        return self.head(self.features(x)) if x is not None else self.inner.forward(x)

    def features(self, x):
        return self.again(x) * self.scale

    def again(self, x):
        return self.forward(x[1:])

    def tie(self):
        self.head = self.scale


def test_what_forward_calls_computes_and_nothing_else_does():
    """Methods that call each other, and torch's own, `head` and `scale`, which are none."""
    assert computing(Model) == {"features", "again"}
