"""What is composed of other operations, against torch's own in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from evenstep.arithmetic.mode import PortableMode
from evenstep.errors import ModelError

ROUNDING = 2e-5  # relative; some hundred roundings of 2⁻²⁴


def close(one, other):
    one, other = one.detach().double(), other.detach()
    scale = max(1.0, float(other.abs().max()))
    return float((one - other).abs().max()) <= ROUNDING * scale


def outcomes(run, *tensors):
    """Return the output and the gradients of `run`, portable in float32 and by torch in float64."""
    found = []
    for mode, dtype in ((PortableMode, torch.float32), (None, torch.float64)):
        inputs = [one.detach().to(dtype).requires_grad_() for one in tensors]
        if mode is None:
            output = run(*inputs)
            output.sin().sum().backward()
        else:
            with mode():
                output = run(*inputs)
                output.sin().sum().backward()
        found.append([output.detach(), *(one.grad for one in inputs)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("masked", ["no", "causal", "added", "boolean"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 4), (1, 1, 1, 1, 8), (2, 2, 17, 17, 16)])
def test_attention(masked, shape):
    batch, heads, targets, sources, width = shape
    torch.manual_seed(0)
    query = torch.randn(batch, heads, targets, width)
    key, value = torch.randn(batch, heads, sources, width), torch.randn(batch, heads, sources, 6)
    seen = torch.rand(targets, sources) < 0.7
    seen[:, 0] = True

    def run(query, key, value):
        mask = {"boolean": seen, "added": seen.to(query.dtype)}.get(masked)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=masked == "causal"
        )

    assert all(close(*pair) for pair in outcomes(run, query, key, value))


@pytest.mark.parametrize(
    "run",
    [
        torch.cdist,
        lambda x, y: torch.lerp(x[:6], y[:6], (x - y[:12]).sigmoid()[:6]),
    ],
)
def test_what_is_made_of_a_few(run):
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randn(15, 4)
    assert all(close(*pair) for pair in outcomes(run, x, y))


def test_batch_statistics():
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    with PortableMode():
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    assert close(mean, x.double().mean((0, 2)))
    assert close(variance, x.double().var((0, 2), correction=0))


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True, "batch_first": True}],
)
def test_lstm(options):
    torch.manual_seed(0)
    plain = nn.LSTM(7, 8, **options).double()
    layer = copy.deepcopy(plain).float()
    x = torch.randn(5, 3, 7)
    with PortableMode():
        outputs, (state, cell) = layer(x)
        (outputs.sum() + 2 * state.sum() + 3 * cell.sum()).backward()
    expected, (last_state, last_cell) = plain(x.double())
    (expected.sum() + 2 * last_state.sum() + 3 * last_cell.sum()).backward()
    assert close(outputs, expected)
    assert close(state, last_state)
    assert close(cell, last_cell)
    for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
        assert close(one.grad, other.grad)
    with PortableMode(), torch.inference_mode():  # torch decomposes it otherwise there
        again, states = layer(x)
    assert torch.equal(again, outputs)
    assert torch.equal(states[1], cell)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_in_evaluation(norm_first, activation):
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(
        16, 4, 32, batch_first=True, norm_first=norm_first, activation=activation
    )
    plain = plain.double().eval()
    layer = copy.deepcopy(plain).float()
    x = torch.randn(3, 5, 16)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    for mask in (None, padding):
        with torch.no_grad(), PortableMode():
            found = layer(x, src_key_padding_mask=mask)
        expected = plain.requires_grad_()(x.double(), src_key_padding_mask=mask)
        seen = ~padding if mask is not None else torch.ones(3, 5).bool()
        assert close(found[seen], expected.detach()[seen])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {"maximize": True}),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("AdamW", {"weight_decay": 0.1}),
        ("Adagrad", {"lr_decay": 0.1}),
    ],
)
def test_fused_optimizers(kind, options):
    torch.manual_seed(0)
    start = torch.randn(50)
    results = []
    for fused in (True, False):
        parameter = nn.Parameter(start.clone() if fused else start.double())
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.01, fused=fused, **options)
        for step in range(4):
            parameter.grad = (parameter.detach() * (step - 1)).clone()
            if fused:
                with PortableMode():
                    optimizer.step()
            else:
                optimizer.step()
        results.append(parameter.detach())
    assert close(*results)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_fused_optimizers_take_the_scale_of_a_grad_scaler(kind, found):
    results = []
    for portable in (True, False):
        parameter = nn.Parameter(torch.linspace(-1, 1, 20))
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.01, fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)
        parameter.grad = torch.linspace(3, 5, 20)
        if portable:
            with PortableMode():
                optimizer.step()
        else:
            optimizer.step()
        results.append((parameter.detach(), parameter.grad))
    assert all(close(*pair) for pair in zip(*results, strict=True))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_computes_its_bfloat16_products_in_float32():
    results = []
    for portable in (True, False):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(8, 6))
        optimizer = torch.optim.Muon([parameter], lr=0.1)
        parameter.grad = torch.randn(8, 6)
        if portable:
            with PortableMode():
                optimizer.step()
        else:
            optimizer.step()
        results.append(parameter.detach())
    assert float((results[0] - results[1]).abs().max()) < 0.1 * 2**-6  # some roundings of bfloat16


X = [torch.ones(3), torch.ones(2)]
LISTS = {
    "a number to the power of each": lambda: torch._foreach_pow(2.0, X),
    "a tensor of factors": lambda: torch._foreach_addcmul(X, X, X, torch.tensor([2.0, 3.0])),
    "norms in float64": lambda: torch._foreach_norm(X, 2, dtype=torch.float64),
}


@pytest.mark.parametrize("case", LISTS)
def test_forms_of_list_operations_that_are_not_portable_are_refused(case):
    with PortableMode(), pytest.raises(ModelError, match="not portable"):
        LISTS[case]()
