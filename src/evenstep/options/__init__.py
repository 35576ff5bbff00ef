"""What a training is given besides model, optimizer and data: experiment, layout and faults."""

from evenstep.options.experiment import Experiment
from evenstep.options.faults import Faults
from evenstep.options.layout import Layout, Owners, Slices, Stages

__all__ = ["Experiment", "Faults", "Layout", "Owners", "Slices", "Stages"]
