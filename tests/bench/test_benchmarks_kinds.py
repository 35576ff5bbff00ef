"""What the page on kinds of training counts."""

import textwrap

import benchmarking  # noqa: F401 - puts benchmarks/ on the path
from specs import kinds


def test_lines_of_a_kind_are_those_of_its_two_trainings(tmp_path, monkeypatch):
    program = """
        import torch
        import evenstep

        def shared(): ...
        def of_plain(): return shared()
        def of_even(): return shared(
        )

        def plain(steps=6):
            model = 1

            loss = of_plain()
            loss.backward()
            return model

        def even(devices, steps=6):
            model = 1
            with evenstep.Trainer() as trainer:
                loss = trainer.step(of_even)
                return model
    """
    (tmp_path / "one.py").write_text(textwrap.dedent(program))
    monkeypatch.setattr(kinds, "PROGRAMS", tmp_path)
    added = "import", "def of_even", ")", "with", "loss ="
    removed = "def of_plain", "loss =", "loss.backward"
    assert kinds.lines("one") == (len(added), len(removed))


def test_the_page_on_kinds_has_every_program():
    names = {path.stem for path in kinds.PROGRAMS.glob("*.py")}
    assert {*kinds.KINDS} == names
    for name in names:
        assert kinds.lines(name) >= (3, 1)
