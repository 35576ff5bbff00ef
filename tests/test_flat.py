"""Many tensors in few vectors, and back."""

import torch

from evenstep.flat import FlatSpace

PARAMETERS = [
    torch.empty(3, 5),
    torch.empty(7, dtype=torch.float64),
    torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.empty(()),
    torch.empty(2, dtype=torch.complex64),
    torch.empty(6, 4).t(),
]


def random_like(parameter):
    return torch.randn_like(parameter)


def test_gradients_come_back_as_they_were():
    space = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    gradients = [random_like(parameter) for parameter in PARAMETERS]
    vectors = space.new()
    assert [vector.dtype for vector in vectors] == [torch.float32, torch.float64, torch.complex64]
    space.fill(vectors, gradients)
    found = dict(space.views(vectors))
    for i, gradient in enumerate(gradients):
        assert torch.equal(found[i], gradient)
        assert found[i].stride() == gradient.stride()


def test_every_place_is_aligned():
    space = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    for _, view in space.views(space.new()):
        assert view.data_ptr() % 64 == 0


def test_only_the_numbers_asked_for_have_a_place():
    space = FlatSpace(PARAMETERS, [0, 3])
    assert [i for i, _ in space.views(space.new())] == [0, 3]


def test_where_there_is_no_gradient_any_number_can_be_added_unchanged():
    space = FlatSpace([torch.empty(4)], [0])
    vectors = space.new()
    space.fill(vectors, [None])
    ((_, nothing),) = space.views(vectors)
    numbers = torch.tensor([0.0, -0.0, 1e-45, torch.inf])
    for total in (numbers + nothing, nothing + numbers):
        assert torch.equal(total.view(torch.int32), numbers.view(torch.int32))


def test_vectors_may_lie_in_given_memory():
    space = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    memory = torch.zeros(space.nbytes, dtype=torch.uint8)
    space.fill(space.over(memory), [torch.ones_like(parameter) for parameter in PARAMETERS])
    for _, view in space.views(space.over(memory)):
        assert (view == 1).all()
