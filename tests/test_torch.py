"""What only the adapter of PyTorch has: convolutions over blocks of pixels, and an output that takes no gradient."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCES = str(Path(__file__).parents[1] / "src")


@pytest.fixture
def answer(framework_python: Callable[[str], Path]) -> Callable[..., Any]:
    """answer(code, *arguments): what the code prints in PyTorch's interpreter, as JSON."""
    python = str(framework_python("torch"))

    def ask(code: str, *arguments: Any) -> Any:
        start = f"import json, sys\nsys.path.insert(0, {SOURCES!r})\nimport torch\nfrom crosstrain_worker.frameworks import torch_layers\n"
        given = [json.dumps(argument) for argument in arguments]
        done = subprocess.run([python, "-B", "-c", start + code, *given], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


BLOCKS = """
found = []
for spec in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    last = torch.channels_last if spec["last"] else torch.contiguous_format
    plain, blocks = (torch_layers.build(spec, on)[0].double().to(memory_format=last) for on in (False, True))
    blocks.load_state_dict(plain.state_dict())
    outputs, gradients = [], []
    for network in (plain, blocks):
        torch.manual_seed(1)
        x = torch.randn([2] + spec["input"]["shape"], dtype=torch.float64).contiguous(memory_format=last).requires_grad_()
        output = network(x)
        (output * torch.randn(output.shape, dtype=torch.float64)).sum().backward()
        outputs.append(output)
        gradients.append([x.grad] + [parameter.grad for parameter in network.parameters()])
    same = [torch.allclose(a, b, atol=1e-12) for a, b in zip([outputs[0]] + gradients[0], [outputs[1]] + gradients[1])]
    kinds = [type(module).__name__ for module in blocks.children()]
    found.append([outputs[0].shape == outputs[1].shape, all(same), len(same), kinds])
print(json.dumps(found))
"""
CONVOLUTIONS = [
    {"size": [3, 32, 32], "kernel": [7, 7], "padding": [3, 3, 3, 3]},
    {"size": [3, 32, 32], "kernel": [7, 7], "padding": [3, 3, 3, 3], "last": True},
    {"size": [1, 13, 10], "kernel": [3, 3], "padding": [0, 0, 0, 0]},
    {"size": [4, 9, 11], "kernel": [4, 5], "padding": [1, 1, 2, 2]},
    {"size": [3, 10, 9], "kernel": [3, 5], "padding": [1, 0, 2, 1]},
    {"size": [2, 15, 15], "kernel": [1, 2], "padding": [0, 0, 0, 0], "last": True},
]


def spec_of_convolution(one: dict[str, Any]) -> dict[str, Any]:
    """What a framework's layers need of a spec, for one of CONVOLUTIONS: 5 channels out, stride 2."""
    size, kernel, padding = one["size"], one["kernel"], one["padding"]
    shape = [5, *((size[i + 1] + sum(padding[2 * i : 2 * i + 2]) - kernel[i]) // 2 + 1 for i in range(2))]
    op = {"op": "conv2d", "name": "conv1", "inputs": ["input"], "out_channels": 5, "kernel": kernel, "stride": [2, 2], "padding": padding,
          "dilation": [1, 1], "groups": 1, "bias": True, "shape": shape}  # fmt: skip
    return {"input": {"shape": size}, "ops": [op], "output": "conv1", "target": {"kind": "class"}, "last": one.get("last", False)}


def test_blocks_of_pixels_give_the_same_convolution_and_gradients(answer: Callable[..., Any]) -> None:
    found = answer(BLOCKS, [spec_of_convolution(one) for one in CONVOLUTIONS])
    # the output, and the gradients of input, weight and bias
    assert found == [[True, True, 4, ["SpaceToDepthConv2d"]]] * len(CONVOLUTIONS)


def test_blocks_of_pixels_want_a_convolution_of_the_input(answer: Callable[..., Any]) -> None:
    """Else the setting would have no effect, and a run would say that it had it."""
    code = """
from crosstrain_worker.frameworks.base import Unsupported
op = {"op": "linear", "name": "fc", "inputs": ["input"], "out": 2, "bias": True, "shape": [2]}
spec = {"input": {"shape": [3]}, "ops": [op], "output": "fc", "target": {"kind": "class"}}
torch_layers.build(spec)
try:
    torch_layers.build(spec, True)
except Unsupported as error:
    print(json.dumps(str(error)))
"""
    assert "not a network without a convolution of its input" in answer(code)


def test_the_output_beside_the_loss_takes_no_gradient(answer: Callable[..., Any]) -> None:
    """To one that does, the backward pass of a compiled network adds a gradient of zeros: as many bytes as the logits have."""
    code = """
network = torch.nn.Linear(3, 2)
x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
found = []
for with_target in (None, lambda x: (network(x), x[:, :2])):
    loss = torch.nn.CrossEntropyLoss() if with_target is None else torch.nn.MSELoss()
    both = torch_layers.Trained(network, loss, with_target)(x, y)
    found.append([tensor.requires_grad for tensor in both])
print(json.dumps(found))
"""
    assert answer(code) == [[True, False]] * 2
