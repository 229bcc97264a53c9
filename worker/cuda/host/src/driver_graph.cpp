// The driver API: graphs. An instance runs its nodes in the order in which they were added, which is consistent with all dependencies.
#include <algorithm>
#include <variant>

#include "device.h"
#include "executor.h"
#include "transfer.h"

namespace hearth {

using Action = std::variant<Launch, Transfer, Fill>;

struct GraphNode {
    Action action;
};

struct Graph {
    std::vector<std::unique_ptr<GraphNode>> nodes;

    GraphNode* add(Action action) {
        nodes.emplace_back(new GraphNode{std::move(action)});
        return nodes.back().get();
    }
    bool holds(const GraphNode* node) const {
        return std::any_of(nodes.begin(), nodes.end(), [&](const auto& own) { return own.get() == node; });
    }
};

struct GraphExec {
    std::vector<std::pair<const GraphNode*, Action>> actions;
};

}  // namespace hearth

using namespace hearth;

namespace {

bool check_dependencies(const Graph& graph, const CUgraphNode* dependencies, size_t count) {
    return std::all_of(dependencies, dependencies + count, [&](const GraphNode* node) { return graph.holds(node); });
}

CUresult make_launch(const Device& device, const CUDA_KERNEL_NODE_PARAMS& p, Launch& launch) {
    if (p.func == nullptr || p.extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    launch.function = p.func;
    launch.set_shape(p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ, p.sharedMemBytes);
    if (CUresult status = launch.check(device.opt_in_shared_bytes()); status != CUDA_SUCCESS) return status;
    launch.set_values(p.kernelParams);
    return CUDA_SUCCESS;
}

CUresult make_transfer(const CUDA_MEMCPY3D& p, Transfer& t) {
    auto known = [](CUmemorytype type) { return type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE; };
    if (!known(p.srcMemoryType) || !known(p.dstMemoryType) || p.Depth != 1 || p.srcZ != 0 || p.dstZ != 0) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    bool from_host = p.srcMemoryType == CU_MEMORYTYPE_HOST, to_host = p.dstMemoryType == CU_MEMORYTYPE_HOST;
    const char* from = from_host ? static_cast<const char*>(p.srcHost) : reinterpret_cast<const char*>(p.srcDevice);
    char* to = to_host ? static_cast<char*>(p.dstHost) : reinterpret_cast<char*>(p.dstDevice);
    t = {to_host ? Side::HOST : Side::DEVICE, to + p.dstY * p.dstPitch + p.dstXInBytes, p.dstPitch,
         from_host ? Side::HOST : Side::DEVICE, from + p.srcY * p.srcPitch + p.srcXInBytes, p.srcPitch, p.WidthInBytes, p.Height};
    return CUDA_SUCCESS;
}

CUresult add_action(Device* device, Stream* stream, const Action& action) {
    if (const auto* launch = std::get_if<Launch>(&action)) {
        return device->streams.add(stream, [device, launch = *launch] { return executor().run(*device, launch); });
    }
    if (const auto* t = std::get_if<Transfer>(&action)) return add_transfer(*device, stream, *t);
    return add_fill(*device, stream, std::get<Fill>(action));
}

}  // namespace

HEARTH_API CUresult cuGraphCreate(CUgraph* graph, unsigned flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    *graph = new Graph;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuGraphDestroy(CUgraph graph) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    delete graph;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                            const CUDA_KERNEL_NODE_PARAMS* parameters) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (!check_dependencies(*graph, dependencies, count)) return CUDA_ERROR_INVALID_VALUE;
    Launch launch;
    if (CUresult status = make_launch(*entry, *parameters, launch); status != CUDA_SUCCESS) return status;
    *node = graph->add(std::move(launch));
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                         const CUDA_MEMCPY3D* parameters, CUcontext) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (!check_dependencies(*graph, dependencies, count)) return CUDA_ERROR_INVALID_VALUE;
    Transfer t;
    if (CUresult status = make_transfer(*parameters, t); status != CUDA_SUCCESS) return status;
    *node = graph->add(t);
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                         const CUDA_MEMSET_NODE_PARAMS* p, CUcontext) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (!check_dependencies(*graph, dependencies, count)) return CUDA_ERROR_INVALID_VALUE;
    *node = graph->add(Fill{reinterpret_cast<char*>(p->dst), p->pitch, p->value, p->elementSize, p->width, p->height});
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    *exec = new GraphExec;
    for (const auto& node : graph->nodes) (*exec)->actions.emplace_back(node.get(), node->action);
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* parameters) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    for (auto& [own, action] : exec->actions) {
        if (own != node || !std::holds_alternative<Launch>(action)) continue;
        Launch launch;
        if (CUresult status = make_launch(*entry, *parameters, launch); status != CUDA_SUCCESS) return status;
        action = std::move(launch);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

HEARTH_API CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& [node, action] : exec->actions) {
        if (CUresult status = add_action(&*entry, stream, action); status != CUDA_SUCCESS) return status;
    }
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuGraphExecDestroy(CUgraphExec exec) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    delete exec;
    return CUDA_SUCCESS;
}
