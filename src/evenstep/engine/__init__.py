"""The engine: tasks that run as soon as what they read has been written, on lanes of devices."""

from evenstep.engine.engine import Engine
from evenstep.engine.handle import Handle, Pending, PendingNumber, Var
from evenstep.engine.lanes import InlineLanes, Lanes, ThreadLanes
from evenstep.engine.task import Task

__all__ = [
    "Engine",
    "Handle",
    "InlineLanes",
    "Lanes",
    "Pending",
    "PendingNumber",
    "Task",
    "ThreadLanes",
    "Var",
]
