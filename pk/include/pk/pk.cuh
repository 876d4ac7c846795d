#pragma once
/// Everything that emitted kernels use, in layers: ptx (one instruction a function), tile (shared and register
/// tiles), comm (roles, pipelines, signals, launches).  A header includes only its own layer and the ones below.

#include "pk/comm/context.cuh"
#include "pk/comm/launch.cuh"
#include "pk/comm/pipeline.cuh"
#include "pk/comm/role.cuh"
#include "pk/comm/signal.cuh"
#include "pk/ptx/fence.cuh"
#include "pk/ptx/ld_st.cuh"
#include "pk/ptx/mbarrier.cuh"
#include "pk/ptx/misc.cuh"
#include "pk/ptx/tma.cuh"
#include "pk/ptx/wgmma.cuh"
#include "pk/tile/mma.cuh"
#include "pk/tile/ops.cuh"
#include "pk/tile/register.cuh"
#include "pk/tile/shared.cuh"
