#include "kernels/vector_math_lanes.h"
