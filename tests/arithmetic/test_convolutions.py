"""Convolutions and their gradients against their definitions, element by element."""

import itertools
import random
from typing import NamedTuple

import pytest
import torch

from chains import chain, some_places
from evenstep.arithmetic.mode import PortableMode
from evenstep.errors import ModelError
from exact_floats import odd_values, same

BACKWARD = torch.ops.aten.convolution_backward.default
LAST = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


class Case(NamedTuple):
    """A convolution's operands and arguments."""

    source: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    stride: list
    padding: list
    dilation: list
    transposed: bool
    output_padding: list
    groups: int

    @property
    def args(self):
        return self[3:]

    def under(self, out, tap):
        """The place of a source element under an output and a kernel position; None outside."""
        place = [
            o * s + t * d - p
            for o, t, s, p, d in zip(
                out, tap, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        return tuple(place)

    def over(self, inner, tap):
        """The output whose kernel position lies on a source element; None if there is none."""
        places = []
        for i, t, s, p, d in zip(inner, tap, self.stride, self.padding, self.dilation, strict=True):
            if (i + p - t * d) % s:
                return None
            places.append((i + p - t * d) // s)
        return tuple(places)

    @property
    def taps(self):
        return list(itertools.product(*map(range, self.weight.shape[2:])))


def element(values, *place):
    """An element; zero beyond the edges of the space."""
    *_, space = place
    inside = all(
        0 <= at < size for at, size in zip(space, values.shape[-len(space) :], strict=True)
    )
    return float(values[(*place[:-1], *space)]) if inside else 0.0


def gathered(case, source, out_channels, in_channels, place, weight):
    """One element of a convolution, as the module's docstring defines it, without bias."""
    n, channel, *out = place
    group = channel // out_channels
    pairs = (
        (weight(group, channel % out_channels, c, tap),
         element(source, n, group * in_channels + c, case.under(out, tap)))
        for c in range(in_channels)
        for tap in case.taps
    )  # fmt: skip
    return chain(pairs)


def scattered(case, source, out_channels, in_channels, place, weight):
    """One element of a transposed convolution, without bias."""
    n, channel, *inner = place
    group = channel // out_channels
    pairs = (
        (weight(group, channel % out_channels, c, tap),
         element(source, n, group * in_channels + c, case.over(inner, tap)))
        for c in range(in_channels)
        for tap in case.taps
        if case.over(inner, tap) is not None
    )  # fmt: skip
    return chain(pairs)


def expected_out(case, place):
    """One element of the result."""
    total = of_space(case, case.source, place, case.transposed)
    return rounded_sum(total, float(case.bias[place[1]]))


def rounded_sum(a, b):
    return float((torch.tensor(a) + torch.tensor(b)).item())


def of_space(case, source, place, transposed):
    """One element of a convolution of `source`, or of a transposed one, without bias."""
    first, second = case.weight.shape[0] // case.groups, case.weight.shape[1]
    if transposed:
        return scattered(
            *(case, source, second, first, place),
            lambda g, o, c, tap: float(case.weight[(g * first + c, o, *tap)]),
        )
    return gathered(
        *(case, source, first, second, place),
        lambda g, o, c, tap: float(case.weight[(g * first + o, c, *tap)]),
    )


def expected_of_weight(case, of_out, place):
    """One element of the weights' gradient: over (example, output position)."""
    wide, narrow = (of_out, case.source) if case.transposed else (case.source, of_out)
    output, c, *tap = place
    first, second = case.weight.shape[0] // case.groups, case.weight.shape[1]
    channel = output // first * second + c
    pairs = [
        (float(narrow[(n, output, *out)]), element(wide, n, channel, case.under(out, tap)), out)
        for n in range(len(narrow))
        for out in itertools.product(*map(range, narrow.shape[2:]))
    ]
    if first == second == 1:
        sums = [chain((a, b) for a, b, out in pairs if out[-1] % 16 == x) for x in range(16)]
        return float(torch.tensor(halved(sums)))
    return chain((a, b) for a, b, _ in pairs)


def halved(sums):
    """Add 16 numbers in float64: 0 and 8, 1 and 9, ...; then 0 and 4, and so on."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[i + half] for i in range(half)]
    return sums[0]


def expected_of_bias(of_out, channel):
    sums = [0.0] * 16
    for i, value in enumerate(of_out[:, channel].flatten().tolist()):
        sums[i % 16] += value
    return float(torch.tensor(halved(sums), dtype=torch.float64).float())


def random_case(seed, *, are_odd):
    """Return a convolution of 1 to 3 axes, in a random memory layout."""
    pick = random.Random(seed)
    while True:
        axes = pick.choice([1, 2, 2, 2, 3])
        groups = pick.choice([1, 1, 2, 3])
        inputs, outputs = groups * pick.choice([1, 2, 5]), groups * pick.choice([1, 3, 4, 13])
        transposed = pick.random() < 0.35

        def numbers(choices, axes=axes):
            return [pick.choice(choices) for _ in range(axes)]

        taps, stride, dilation = numbers([1, 2, 3, 5]), numbers([1, 1, 2, 3]), numbers([1, 1, 2])
        padding = numbers([0, 1, 2])
        more = [pick.randrange(max(a, b)) for a, b in zip(stride, dilation, strict=True)]
        more = more if transposed else [0] * axes
        first, second = (inputs, outputs) if transposed else (outputs, inputs)
        shapes = [
            (pick.choice([1, 2, 5]), inputs, *numbers([3, 4, 7, 11, 18] if axes < 3 else [3, 5])),
            (first, second // groups, *taps),
            (outputs,),
        ]
        tensors = [made(shape, seed + i, are_odd=are_odd) for i, shape in enumerate(shapes)]
        for i in range(2):
            if pick.random() < 0.4:
                tensors[i] = tensors[i].contiguous(memory_format=LAST[axes + 2])
        case = Case(*tensors, stride, padding, dilation, transposed, more, groups)
        try:
            out = torch.convolution(*(x.double() for x in tensors), *case.args)
        except RuntimeError:  # the kernel is larger than the input
            continue
        of_out = made(out.shape, seed + 3, are_odd=are_odd)
        if pick.random() < 0.3:
            of_out = of_out.transpose(0, 1).contiguous().transpose(0, 1)
        elif pick.random() < 0.4:
            of_out = of_out.contiguous(memory_format=LAST[axes + 2])
        return case, of_out


def made(shape, seed, *, are_odd):
    if are_odd:
        return odd_values(int(torch.tensor(shape).prod()), seed).reshape(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def computed(case, of_out):
    """Return the result, and the gradients of the input, the weights and the bias."""
    arguments = (case.source, case.weight)
    with PortableMode():
        out = torch.convolution(*case)
        return out, *BACKWARD(of_out, *arguments, case.bias.shape, *case.args, [True] * 3)


@pytest.mark.parametrize("seed", range(40))
def test_elements_are_their_chains(variant, seed):
    case, of_out = random_case(seed, are_odd=seed % 2 == 0)
    out, of_source, of_weight, of_bias = computed(case, of_out)
    for place in some_places(out.shape, 6, seed):
        assert same(out[place], torch.tensor(expected_out(case, place)))
    for place in some_places(of_source.shape, 6, seed):
        expected = of_space(case, of_out, place, not case.transposed)
        assert same(of_source[place], torch.tensor(expected))
    for place in some_places(of_weight.shape, 3, seed):
        assert same(of_weight[place], torch.tensor(expected_of_weight(case, of_out, place)))
    for channel in range(len(of_bias)):
        assert same(of_bias[channel], torch.tensor(expected_of_bias(of_out, channel)))


@pytest.mark.parametrize("seed", range(100, 130))
def test_gradients_are_those_of_float64_but_for_rounding(variant, seed):
    case, of_out = random_case(seed, are_odd=False)
    exact, sizes = (
        reference(Case(*(f(x.double()) for x in case[:3]), *case.args), f(of_out.double()))
        for f in (torch.Tensor.clone, torch.abs)
    )
    channels = case.weight[0].numel() * case.weight.shape[0]
    depths = [channels, channels, of_out.numel() + case.source.numel(), of_out.numel()]
    for one, wanted, size, depth in zip(computed(case, of_out), exact, sizes, depths, strict=True):
        assert one.shape == wanted.shape
        # A chain of n operations is off by at most n 2⁻²⁴ times the sum of the products' sizes.
        assert ((one - wanted).abs() <= 1.01 * (depth + 1) * 2**-24 * size).all()


def reference(case, of_out):
    """What `computed` returns, by torch."""
    inputs = [x.requires_grad_() for x in case[:3]]
    out = torch.convolution(*inputs, *case.args)
    return out.detach(), *torch.autograd.grad(out, inputs, of_out)


@pytest.mark.parametrize("seed", range(200, 240))
def test_memory_layouts_and_variants_have_the_same_bits(seed, variant):
    case, of_out = random_case(seed, are_odd=True)
    plain = Case(*(x.contiguous() for x in case[:3]), *case.args)
    last = Case(*(x.contiguous(memory_format=LAST[x.ndim]) for x in case[:2]), *case[2:])
    results = computed(case, of_out), computed(plain, of_out.contiguous()), computed(last, of_out)
    for one, two, three in zip(*results, strict=True):
        assert same(one, two)
        assert same(one, three)
    at = len(case.source) - 1  # and an example alone has the bits that it has in a batch
    alone = Case(case.source[at:], *case[1:])
    assert same(computed(alone, of_out[at:])[0], results[0][0][at:])
    assert same(computed(alone, of_out[at:])[1], results[0][1][at:])


@pytest.mark.parametrize("last", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("taps", [1, 3])
def test_results_have_the_memory_layouts_of_torch(last, groups, taps):
    tensors = [torch.randn(4, 8, 20, 20), torch.randn(8, 8 // groups, taps, taps), torch.randn(8)]
    for i in last:
        tensors[i] = tensors[i].contiguous(memory_format=torch.channels_last)
    case = Case(*tensors, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    of_out = torch.randn(torch.convolution(*case).shape)
    expected = reference(case, of_out)
    tensors = [x.detach() for x in tensors]
    for one, wanted in zip(computed(Case(*tensors, *case.args), of_out), expected, strict=True):
        assert strides(one) == strides(wanted)


def strides(tensor):
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("shape", [(70, 3, 9, 9), (3, 40, 17, 40), (2, 30, 40, 40)])
def test_blocks_of_examples_and_channels(variant, shape):
    if variant == "plain" and shape[2] == 40:
        shape = (2, 10, 40, 30)
    case = Case(
        *(made(s, i, are_odd=False) for i, s in enumerate([shape, (20, shape[1], 3, 3), (20,)])),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    )
    of_out = made((shape[0], 20, *shape[2:]), 3, are_odd=False)
    out, of_source, of_weight, _ = computed(case, of_out)
    for place in some_places(out.shape, 6, 0):
        assert same(out[place], torch.tensor(expected_out(case, place)))
        place = (place[0], place[1] % shape[1], *place[2:])
        expected = of_space(case, of_out, place, True)
        assert same(of_source[place], torch.tensor(expected))
    place = (19, shape[1] - 1, 2, 0)
    assert same(of_weight[place], torch.tensor(expected_of_weight(case, of_out, place)))


def test_mask_and_empty_batch():
    case = Case(
        *(torch.randn(0, 4, 5, 5), torch.randn(6, 4, 3, 3), torch.randn(6)),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    )
    out, of_source, of_weight, of_bias = computed(case, torch.randn(0, 6, 3, 3))
    assert out.shape == (0, 6, 3, 3)
    assert of_source.shape == case.source.shape
    assert same(of_weight, torch.zeros(6, 4, 3, 3))
    assert same(of_bias, torch.zeros(6))
    arguments = (torch.randn(0, 6, 3, 3), case.source, case.weight, [6], *case.args)
    for mask in itertools.product([True, False], repeat=3):
        with PortableMode():
            results = BACKWARD(*arguments, list(mask))
        assert [one is not None for one in results] == list(mask)


@pytest.mark.parametrize(
    ("name", "source", "weight", "options"),
    [
        ("conv2d", (2, 3, 7, 8), (4, 3, 3, 3), {"padding": "same"}),
        ("conv2d", (3, 7, 8), (4, 3, 3, 2), {"stride": 2}),
        ("conv1d", (2, 4, 9), (6, 2, 3), {"padding": "same", "groups": 2}),
        ("conv3d", (1, 2, 4, 5, 6), (3, 2, 2, 2, 2), {"padding": 1}),
        ("conv_transpose1d", (2, 4, 5), (4, 3, 3), {"stride": 2, "output_padding": 1}),
        ("conv_transpose2d", (2, 4, 5, 5), (4, 3, 1, 2), {"padding": 1, "stride": 3}),
    ],
)
def test_functions_of_torch_reach_the_kernels(variant, name, source, weight, options):
    inputs = [made(s, i, are_odd=False).requires_grad_() for i, s in enumerate((source, weight))]
    function = getattr(torch.nn.functional, name)

    def results(*inputs):
        out = function(*inputs, **options)
        return out, *torch.autograd.grad(out.sum(), inputs)

    with PortableMode():
        out = function(*inputs, **options)
        found = out, *torch.autograd.grad(out, inputs, torch.ones_like(out))
    exact = results(*(x.detach().double().requires_grad_() for x in inputs))
    for one, wanted in zip(found, exact, strict=True):
        assert torch.allclose(one.double(), wanted, rtol=0, atol=1e-4)


def test_arguments_that_do_not_fit_raise_torchs_error():
    source, weight = torch.ones(1, 4, 5, 5), torch.ones(6, 2, 3, 3)
    for options in ({}, {"groups": 3}, {"groups": 2, "stride": 0}, {"groups": 2, "dilation": 9}):
        with (
            PortableMode(),
            pytest.raises(RuntimeError, match=r"[Gg]iven|size|stride|non-positive"),
        ):
            torch.nn.functional.conv2d(source, weight, **options)
    with PortableMode(), pytest.raises(RuntimeError, match="bias"):
        torch.nn.functional.conv2d(source, weight, torch.ones(5), groups=2)
    with PortableMode(), pytest.raises(ModelError, match="convolution of float64"):
        torch.nn.functional.conv2d(source.double(), weight.double(), groups=2)


@pytest.mark.parametrize("more", [1, -1])
def test_padding_of_an_output_that_torch_refuses_is_refused(more):
    images, weight = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2)
    with PortableMode(), pytest.raises((RuntimeError, ModelError), match="output.padding"):
        torch.nn.functional.conv_transpose2d(images, weight, output_padding=more)
