//! Memory that graphs allocate. It is taken from the device when a graph runs and kept until it is trimmed, so it counts
//! from the node's making on, and a trim makes the count what the device says.

use crate::{
    account::{Gpu, Meets, on_device},
    book::{Entry, Kind},
    driver,
    pools::Properties,
    result::{CuResult, SUCCESS},
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

impl NodeParameters {
    fn allocation(&self) -> Option<&AllocationNode> {
        (self.kind == ALLOCATES).then_some(&self.allocation)
    }
}

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// A node that allocates.
    fn cuGraphAddMemAllocNode(
        node: *mut usize, graph: usize, dependencies: *const usize, count: usize, parameters: *mut AllocationNode,
    ) |real| {
        let make = || real(node, graph, dependencies, count, parameters);
        add_node(parameters.as_ref(), make)
    }

    /// A node of any kind.
    fn cuGraphAddNode(
        node: *mut usize, graph: usize, dependencies: *const usize, count: usize, parameters: *mut NodeParameters,
    ) |real| {
        let make = || real(node, graph, dependencies, count, parameters);
        add_node(parameters.as_ref().and_then(NodeParameters::allocation), make)
    }

    /// A node of any kind, with data on its edges.
    fn cuGraphAddNode_v2(
        node: *mut usize, graph: usize, dependencies: *const usize, edges: *const core::ffi::c_void, count: usize,
        parameters: *mut NodeParameters,
    ) |real| {
        let make = || real(node, graph, dependencies, edges, count, parameters);
        add_node(parameters.as_ref().and_then(NodeParameters::allocation), make)
    }

    /// Gives back to the device what no graph that runs is using.
    fn cuDeviceGraphMemTrim(device: i32) |real| {
        let answer = real(device);
        if answer == SUCCESS && let Meets::Limit(gpu) = on_device(device) && let Some(reserved) = driver::graph_memory(device) {
            let over = gpu.book(|book| {
                book.lower(Kind::Graphs, gpu.number as u64, |counted| counted.saturating_sub(reserved))
            });
            gpu.give_back(over.flatten().unwrap_or(0));
        }
        answer
    }
}

fn add_node(allocation: Option<&AllocationNode>, make: impl FnOnce() -> CuResult) -> CuResult {
    let Some(allocation) = allocation else { return make() };
    // SAFETY: they begin as a pool's properties do.
    let properties = unsafe { &*(&raw const allocation.properties).cast::<Properties>() };
    properties.meets().run(make, |gpu, make| add(gpu, allocation.size as u64, make))
}

/// Adds to what the graphs on a GPU take.
pub fn add(gpu: Gpu, size: u64, make: impl FnOnce() -> CuResult) -> CuResult {
    let answer = gpu.reserved(size, make);
    if answer == SUCCESS {
        let entry = Entry::new(Kind::Graphs, gpu.number as u64, gpu.number, size, 0);
        gpu.book(|book| book.add(entry));
    }
    answer
}
