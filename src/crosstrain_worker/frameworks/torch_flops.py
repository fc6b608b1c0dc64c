"""FLOPs that PyTorch executes, counted by its own counter (torch.utils.flop_counter) kernel by kernel as they are called.

Some formulas replace the counter's own or are missing there. As in the spec, what counts is 2 × the multiply-adds of convolutions
and matrix products: gradients of a grouped convolution (the counter ignores the groups), the fused LSTM, the fused attention of the
CPU; left out are the scores that fused attention computes again in its backward pass, and the averages that MaskedMean writes as a
product (pooling counts 0).
"""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

aten = torch.ops.aten


# A formula gets a kernel's arguments with shapes in place of tensors.
def convolution_backward(d_output, x, weight, _bias, _stride, _padding, _dilation, transposed, _more, _groups, mask, **_):
    """The gradients of input and weight cost what the forward pass does; `mask` says which were computed."""
    pixels = math.prod((x if transposed else d_output)[2:])
    return 2 * d_output[0] * pixels * math.prod(weight) * (mask[0] + mask[1])


def bmm(a, b, **_):
    """0 where a side is 1: a weighted sum or its gradient, no matrix product."""
    sides = a[1], a[2], b[2]
    return 0 if 1 in sides else 2 * a[0] * math.prod(sides)


def lstm_products(x, weights):
    """2 × batch × time × every weight matrix; x is (T, N, in) or (N, T, in)."""
    return 2 * x[0] * x[1] * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def mkldnn_lstm(x, *weights, **_):
    return lstm_products(x, weights[:2])


def mkldnn_lstm_backward(x, *weights, **_):
    """All gradients, asked for or not."""
    return 2 * lstm_products(x, weights[:2])


def cudnn_lstm(x, weights, *_, **__):
    return lstm_products(x, weights)


def cudnn_lstm_backward(x, weights, *others, **_):
    """That of the input always; those of the weights where the mask (the last argument) says so."""
    return (1 + others[-1][3]) * lstm_products(x, weights)


def attention(query, key, value, *_, **__):
    return sdpa_flop_count(query, key, value)


def attention_backward(_d_output, query, key, value, *_, **__):
    return 2 * sdpa_flop_count(query, key, value)


FORMULAS = {
    aten.convolution_backward: convolution_backward,
    aten.bmm: bmm,
    aten.mkldnn_rnn_layer: mkldnn_lstm,
    aten.mkldnn_rnn_layer_backward: mkldnn_lstm_backward,
    aten._cudnn_rnn: cudnn_lstm,
    aten._cudnn_rnn_backward: cudnn_lstm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    aten._scaled_dot_product_flash_attention_backward: attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: attention_backward,
}


def count(work):
    """{kernel: FLOPs} of all that `work()` calls."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        work()
    return {str(kernel): int(flops) for kernel, flops in counter.get_flop_counts().get("Global", {}).items()}
