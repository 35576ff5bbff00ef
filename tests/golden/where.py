"""Where golden results belong to: the version of torch, and how this process rounds."""

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

from evenstep.devices import parse_device
from evenstep.devices.arithmetic import known_results

GOLDEN = Path(__file__).with_name("golden.json")

FIRST = "matrix products", "convolutions", "functions", "sums", "random numbers"
"""The known results of the first version; later ones would move the keys of recorded results."""

LAYERS = {
    "wide": (lambda: nn.Linear(257, 33), (17, 257)),
    "narrow": (lambda: nn.Linear(6, 5), (3, 6)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3, 2, 1), (5, 3, 9, 9)),
    "groups": (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 7, 7)),
    "recurrent": (lambda: nn.LSTM(6, 9), (4, 3, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 24, 0.0), (5, 3, 16)),
}


def environment():
    """Name what decides bits here: torch's version, and a digest of what small layers compute.

    Two processors on which these have the same bits share their golden results. The layers are
    computed with one thread, as the runs are, whatever the process has now.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _environment()
    finally:
        torch.set_num_threads(threads)


def _environment():
    found = known_results([parse_device("cpu")])
    named = {f"the result of known {name}": found[f"the result of known {name}"] for name in FIRST}
    digest = hashlib.sha256(json.dumps(named).encode())
    for dtype in torch.float32, torch.float64, torch.bfloat16:
        for build, shape in LAYERS.values():
            for result in _computed(build, shape, dtype):
                digest.update(result.detach().contiguous().view(-1).view(torch.uint8).numpy())
    kind = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {kind}, {digest.hexdigest()[:16]}"


def load():
    """Return the recorded results: by environment, then by the name of the run.

    In the file, the name of an earlier environment stands for a result that it had too.
    """
    document = json.loads(GOLDEN.read_text())
    return {
        here: {
            name: document[found][name] if isinstance(found, str) else found
            for name, found in results.items()
        }
        for here, results in document.items()
    }


def save(document):
    """Write what `load` returns, with another environment's results added or changed."""
    short = {}
    for here, results in document.items():
        short[here] = {}
        for name, found in sorted(results.items()):
            alike = (one for one in short if document[one].get(name) == found)
            first = next(alike, here)
            short[here][name] = found if first == here else first
    GOLDEN.write_text(json.dumps(short, indent=1) + "\n")


def _computed(build, shape, dtype):
    """Return a layer's output and gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, x = build().to(dtype), torch.randn(shape).to(dtype).requires_grad_()
    output = layer(x)
    output = output[0] if isinstance(output, tuple) else output
    leaves = [x, *layer.parameters()]
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]
