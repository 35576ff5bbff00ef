"""The contract of a step, checked: what a shard's code may read and write.

What a shard computes must be a function of the parameters, the buffers at the step's opening, the
shard's examples, and the shard's random numbers, and it must give a total and a count that add up
over the shards.
"""

from evenstep.contract.check import ContractReport
from evenstep.contract.outside.process_settings import refuse_modes
from evenstep.contract.self_check import SelfCheck

__all__ = ["ContractReport", "SelfCheck", "refuse_modes"]
