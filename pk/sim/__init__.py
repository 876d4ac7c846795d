"""The simulator: runs a kernel's IR with NumPy on any number of ranks, under an adversarial, seeded schedule.

``simulate`` runs one launch.  ``ops`` is the definition of the language's operations, ``machine`` of waiting and
lateness, ``memory`` of addressing and clipping, ``values`` of rounding.
"""

from pk.sim.run import Report, SimTensor, simulate

__all__ = ["Report", "SimTensor", "simulate"]
