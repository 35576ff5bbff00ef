"""The engine: lanes that run work on devices, and handles to results not yet waited for."""

from evenstep.engine.handle import Handle
from evenstep.engine.lanes import InlineLanes, Lanes, Task, ThreadLanes

__all__ = ["Handle", "InlineLanes", "Lanes", "Task", "ThreadLanes"]
