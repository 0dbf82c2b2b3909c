//! Memory that graphs allocate. It is taken from the device when a graph runs and kept until it is trimmed, so it counts
//! from the node's making on, and a trim makes the count what the device says.

use crate::{
    account::{Gpu, Meets, on_device},
    book::{Entry, Kind},
    driver,
    pools::{ON_DEVICE, PoolProperties},
    result::{CuResult, OUT_OF_MEMORY, SUCCESS},
};

/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const ALLOCATES: i32 = 10;

/// CUDA_MEM_ALLOC_NODE_PARAMS, whose pool properties have 88 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct AllocationNode {
    properties: [u64; 11],
    access: *const core::ffi::c_void,
    access_count: usize,
    size: usize,
    pointer: u64,
}

/// CUgraphNodeParams: a kind and, 16 bytes on, that kind's own.
#[repr(C)]
#[derive(Debug)]
pub struct NodeParameters {
    kind: i32,
    reserved: [i32; 3],
    allocation: AllocationNode,
}

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// A node that allocates.
    fn cuGraphAddMemAllocNode(
        node: *mut usize, graph: usize, dependencies: *const usize, count: usize, parameters: *mut AllocationNode,
    ) |real| {
        let make = || real(node, graph, dependencies, count, parameters);
        match parameters.as_ref() {
            Some(allocation) => add_node(allocation, make),
            None => make(),
        }
    }

    /// A node of any kind.
    fn cuGraphAddNode(
        node: *mut usize, graph: usize, dependencies: *const usize, count: usize, parameters: *mut NodeParameters,
    ) |real| {
        let make = || real(node, graph, dependencies, count, parameters);
        match parameters.as_ref() {
            Some(parameters) if parameters.kind == ALLOCATES => add_node(&parameters.allocation, make),
            _ => make(),
        }
    }

    /// A node of any kind, with data on its edges.
    fn cuGraphAddNode_v2(
        node: *mut usize, graph: usize, dependencies: *const usize, edges: *const core::ffi::c_void, count: usize,
        parameters: *mut NodeParameters,
    ) |real| {
        let make = || real(node, graph, dependencies, edges, count, parameters);
        match parameters.as_ref() {
            Some(parameters) if parameters.kind == ALLOCATES => add_node(&parameters.allocation, make),
            _ => make(),
        }
    }

    /// Gives back to the device what no graph that runs is using.
    fn cuDeviceGraphMemTrim(device: i32) |real| {
        let answer = real(device);
        if answer == SUCCESS && let Meets::Limit(gpu) = on_device(device) && let Some(reserved) = driver::graph_memory(device) {
            let over = gpu.book(|book| {
                let entry = book.find(Kind::Graphs, gpu.number as u64)?;
                let over = entry.size.saturating_sub(reserved);
                entry.size -= over;
                Some(over)
            });
            gpu.give_back(over.flatten().unwrap_or(0));
        }
        answer
    }
}

fn add_node(allocation: &AllocationNode, make: impl FnOnce() -> CuResult) -> CuResult {
    // SAFETY: the properties begin as those of a pool.
    let properties = unsafe { &*(&raw const allocation.properties).cast::<PoolProperties>() };
    if properties.location_kind() != ON_DEVICE {
        return make();
    }
    match on_device(properties.location()) {
        Meets::Nothing => make(),
        Meets::Refusal => OUT_OF_MEMORY,
        Meets::Limit(gpu) => add(gpu, allocation.size as u64, make),
    }
}

/// Adds to what the graphs on a GPU take.
pub fn add(gpu: Gpu, size: u64, make: impl FnOnce() -> CuResult) -> CuResult {
    if !gpu.reserve(size) {
        return gpu.deny();
    }
    let answer = make();
    if answer != SUCCESS {
        gpu.give_back(size);
        return answer;
    }
    gpu.book(|book| match book.find(Kind::Graphs, gpu.number as u64) {
        Some(entry) => entry.size += size,
        None => {
            book.insert(Entry::new(Kind::Graphs, gpu.number as u64, gpu.number, size, 0));
        }
    });
    answer
}
