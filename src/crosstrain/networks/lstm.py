"""LSTM networks: the language model of Shi et al. (6,180,624 parameters) and the classifier of Bahrampour et al. (1,411,842)."""

from __future__ import annotations

from crosstrain.networks.ops import uniform
from crosstrain.networks.spec import Network, Spec, classes, tokens


def lstm_language(steps: int = 32, vocabulary: int = 10000, width: int = 256, layers: int = 2) -> Spec:
    """Embedding, `layers` LSTMs of this width, the next word's logits at each of `steps` tokens.

    Weights start uniform in ±0.1, biases (that of the forget gate too) at 0; there is no dropout. A sequence is one sample: the
    batch counts sequences, and the state starts from zeros in each.
    """
    start = uniform(0.1)
    net = Network("lstm", tokens(steps), classes(vocabulary))
    net.add("embedding", "embedding", vocabulary=vocabulary, width=width, init=start)
    for k in range(1, layers + 1):
        net.add("lstm", f"lstm{k}", hidden=width, init=start)
    net.add("linear", "fc", out=vocabulary, init=start)
    return net.finish()


def lstm_classifier(
    length: int = 100, vocabulary: int = 10000, width: int = 128, dropout: float = 0.5, num_classes: int = 2
) -> Spec:
    """Embedding, LSTM, mean over the tokens that are no padding (id 0), dropout, fc."""
    net = Network("lstm", tokens(length), classes(num_classes))
    net.add("embedding", "embedding", vocabulary=vocabulary, width=width)
    net.add("lstm", "lstm", hidden=width)
    net.add("masked_mean", "mean")
    net.add("dropout", "dropout", rate=dropout)
    net.add("linear", "fc", out=num_classes)
    return net.finish()
