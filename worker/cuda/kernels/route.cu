// Choice of experts for each token (route.cuh).

#include "route.cuh"

constexpr int ROUTE_WARPS = 4;

// Grid ceil(tokens / 4), 128 threads. n_experts <= 512 is a multiple of groups <= 32, and top_k <= 32 experts must fit in
// top_groups groups.
extern "C" __global__ void route(
    Rows logits, const float* bias, unsigned* experts, float* weights, int tokens, int n_experts, int top_k, int groups, int top_groups,
    int sigmoid, int normalize, float scaling) {
    __shared__ RouteScratch scratches[ROUTE_WARPS];
    int token = blockIdx.x * ROUTE_WARPS + threadIdx.x / 32;
    if (token >= tokens) return;
    Router router = {logits, bias, experts, weights, n_experts, top_k, groups, top_groups, sigmoid != 0, normalize != 0, scaling};
    route_token(router, scratches[threadIdx.x / 32], token);
}
