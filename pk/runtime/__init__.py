"""From ``artifact.Source`` to a finished launch: NVRTC, cache, modules, symmetric memory, groups."""
