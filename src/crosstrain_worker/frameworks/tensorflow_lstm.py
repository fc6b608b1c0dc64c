"""The LSTM in TensorFlow: cuDNN's kernel on GPUs; elsewhere the input's product once for all time steps, then the steps.

Found by experiment on the CPU (2.21): the one-kernel op BlockLSTM is 1.6 to 2 times slower than these steps, Keras's layer (a loop with
both products in each step) equal or up to 15 % slower; XLA knows neither BlockLSTM nor cuDNN's op.
"""

import tensorflow as tf

#: up to so many time steps the steps are written out in a graph (faster, but built for longer), else they are a loop
UNROLLED = 128


def lstm_layer(network, op):
    """The builder of the op lstm, see tensorflow_layers. Gates i, f, g, o; zero initial state."""
    time, width = network.input_shape(op)
    hidden = op["hidden"]
    bias_shape = (4 * hidden,)
    if network.gpu and not network.xla and network.half in (None, tf.float16):
        w_ih = network.parameter(op, "weight_ih", (4 * hidden, width))
        w_hh = network.parameter(op, "weight_hh", (4 * hidden, hidden))
        bias = network.parameter(op, "bias", bias_shape)
        return lambda mode, x: cudnn(x, network.lowered(w_ih), network.lowered(w_hh), network.lowered(bias), mode.training)
    layout = (lambda a: a.T, lambda a: a.T)
    kernel = network.parameter(op, "weight_ih", (width, 4 * hidden), layout)
    recurrent = network.parameter(op, "weight_hh", (hidden, 4 * hidden), layout)
    bias = network.parameter(op, "bias", bias_shape)
    steps = looped if network.xla or time > UNROLLED else written_out

    def layer(mode, x):
        # time first: each step then reads one piece of memory
        rows = tf.reshape(tf.transpose(x, (1, 0, 2)), (-1, width))
        z = tf.nn.bias_add(tf.matmul(rows, network.lowered(kernel)), network.lowered(bias))
        return steps(tf.reshape(z, (time, -1, 4 * hidden)), network.lowered(recurrent))

    return layer


def cell(z, h, c, recurrent):
    """(h, c) after one step; z: the input's part of the gates, with the bias."""
    i, f, g, o = tf.split(z + tf.matmul(h, recurrent), 4, 1)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
    return tf.sigmoid(o) * tf.tanh(c), c


def zero_state(z):
    return tf.zeros((tf.shape(z)[1], z.shape[2] // 4), z.dtype)


def written_out(z, recurrent):
    h = c = zero_state(z)
    outputs = []
    for part in tf.unstack(z):
        h, c = cell(part, h, c, recurrent)
        outputs.append(h)
    return tf.stack(outputs, 1)


def looped(z, recurrent):
    time, hidden = z.shape[0], z.shape[2] // 4
    parts = tf.TensorArray(z.dtype, time, element_shape=z.shape[1:]).unstack(z)
    outputs = tf.TensorArray(z.dtype, time, element_shape=(z.shape[1], hidden))

    def body(t, h, c, outputs):
        h, c = cell(parts.read(t), h, c, recurrent)
        return t + 1, h, c, outputs.write(t, h)

    state = zero_state(z)
    found = tf.while_loop(lambda t, *_: t < time, body, (0, state, state, outputs), maximum_iterations=time)
    return tf.transpose(found[3].stack(), (1, 0, 2))


def cudnn(x, w_ih, w_hh, bias, training):
    """cuDNN has all weights in one row: those of the input, of the state, then two biases, the first of which stays 0 here."""
    flat = tf.concat([tf.reshape(w_ih, (-1,)), tf.reshape(w_hh, (-1,)), tf.zeros_like(bias), bias], 0)
    batch, time = tf.shape(x)[0], x.shape[1]
    state = tf.zeros((1, batch, w_hh.shape[1]), x.dtype)
    outputs = tf.raw_ops.CudnnRNNV3(
        input=tf.transpose(x, (1, 0, 2)),
        input_h=state,
        input_c=state,
        params=flat,
        sequence_lengths=tf.fill((batch,), time),
        rnn_mode="lstm",
        is_training=training,
        time_major=True,
    )[0]
    return tf.transpose(outputs, (1, 0, 2))
